"""Times and bounds of a member of the published protocol."""

from dataclasses import dataclass
from typing import Final

COUNTS_FOR: Final = 3
"""Intervals without a beacon, an answer or an announcement until there is nobody any more."""
DOUBTED_AFTER: Final = 2.5
"""Intervals of silence after which a root with a lower id is believed less than another one that
speaks: more than one lost announcement, less than COUNTS_FOR."""


class BadConfig(ValueError):
    """The text says what is wrong, and what to do."""


@dataclass(frozen=True)
class PaperConfig:
    redundancy: int = 2
    """Parents per topic, at most."""
    core_ann_interval_s: float = 10.0
    beacon_interval_s: float = 10.0
    qos: int = 2
    """Of everything that is published, on the neighbours' brokers and on the own one."""
    answer_delay_s: float = 0.05
    """From the first copy of an announcement until parents are answered, so that it is the R lowest
    of the nearest neighbours who are, whichever copy came first. 0: as published, each at once."""
    hops_max: int = 32
    payload_bytes_max: int = 1 << 20
    """Of a publication; a longer one stays where it is."""
    topics_max: int = 10_000
    neighbours_max: int = 64

    def __post_init__(self) -> None:
        for name in ("redundancy", "payload_bytes_max", "topics_max", "neighbours_max"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("core_ann_interval_s", "beacon_interval_s"):
            if not getattr(self, name) > 0:
                raise BadConfig(f"{name} is {getattr(self, name)}: it must be above 0")
        if self.qos not in (0, 1, 2):
            raise BadConfig(f"qos is {self.qos}: it must be 0, 1 or 2")
        if self.hops_max < 2:
            raise BadConfig(f"hops_max is {self.hops_max}: it must be at least 2")
        if not 0 <= self.answer_delay_s < self.core_ann_interval_s:
            raise BadConfig(
                f"answer_delay_s is {self.answer_delay_s}: it must be 0 or more, and less than "
                f"core_ann_interval_s, which is {self.core_ann_interval_s}"
            )

    @property
    def root_expires_s(self) -> float:
        """Also when children do."""
        return COUNTS_FOR * self.core_ann_interval_s

    @property
    def root_doubted_s(self) -> float:
        return DOUBTED_AFTER * self.core_ann_interval_s

    @property
    def beacon_expires_s(self) -> float:
        return COUNTS_FOR * self.beacon_interval_s

    @property
    def distance_max(self) -> int:
        """To the root."""
        return self.hops_max // 2
