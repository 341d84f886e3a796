"""Finds settings of [federation] that contradict the rest of a broker's."""

from collections.abc import Iterator

from holdfast.config.federation import Federation, federation_problems
from holdfast.config.problem import Problem, shown
from holdfast.config.schema import Config


def federation_contradictions(config: Config) -> Iterator[Problem]:
    """The settings of [federation] that contradict each other or the broker's."""
    federation = config.federation
    if federation is None:
        return
    yield from federation_problems(federation)
    if federation.data != Federation().data:
        yield (
            "federation.data",
            f" = {shown(federation.data)}: a broker keeps what belongs to the federation in its"
            " data directory (node.data): leave it out",
        )
