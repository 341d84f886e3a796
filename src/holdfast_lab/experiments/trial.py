"""Circumstances of one experiment: how long it may take, where its files go, who watches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass
class Trial:
    """Arguments of an experiment beside its target."""

    run: str
    """The name of the run in its events; each name is used once."""
    directory: Path
    is_quick: bool
    progress: Callable[[float, str], None]
    """Called with the share that is done, 0 to 1, and what is being done."""
    parameters: dict[str, str] = field(default_factory=dict)

    def choose(self, quick: Number, full: Number) -> Number:
        """The one of two numbers that fits the length of the trial."""
        return quick if self.is_quick else full
