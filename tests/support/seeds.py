"""Which seeds the simulations run: the same ones each time, or those from HOLDFAST_FIRST_SEED on.

`make sim` draws a first seed that nobody has seen, and prints it. `make test` does not set it.
"""

import os
from typing import Final

FIRST: Final = int(os.environ.get("HOLDFAST_FIRST_SEED", "0"))


def block_of_seeds(block: int, blocks: int, count: int) -> range:
    """One of `blocks` parts of `count` seeds."""
    return range(FIRST + block, FIRST + count, blocks)
