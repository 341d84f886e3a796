"""`holdfast`, on a machine whose wall clock is wrong:

    python -m tests.support.skewed_node serve --data DIR ...

A file `skew` beside DIR has by how many seconds; it may change while the node runs.
"""

import sys
import time
from pathlib import Path

from holdfast.cli.main import main

_true_ns = time.time_ns


class WrongClock:
    def __init__(self, file: Path) -> None:
        self._file = file

    def time_ns(self) -> int:
        try:
            skew_s = float(self._file.read_text())
        except (OSError, ValueError):
            skew_s = 0.0
        return _true_ns() + int(skew_s * 1e9)


if __name__ == "__main__":
    data = Path(sys.argv[sys.argv.index("--data") + 1])
    time.time_ns = WrongClock(data.parent / "skew").time_ns
    sys.exit(main())
