"""Times and bounds of a member of the published protocol."""

from dataclasses import dataclass
from typing import Final

COUNTS_FOR: Final = 3
"""The intervals without a beacon, answer or announcement after which its sender is ignored."""
DOUBTED_AFTER: Final = 2.5
"""The intervals of silence after which a root with a lower id gives way to another that announces
itself. It allows for more than one lost announcement and is less than COUNTS_FOR."""


class BadConfig(ValueError):
    """A setting that is out of range. The text says what is wrong and what to do."""


@dataclass(frozen=True)
class PaperConfig:
    """The times and bounds of one member."""

    redundancy: int = 2
    """The most parents per topic."""
    core_ann_interval_s: float = 10.0
    beacon_interval_s: float = 10.0
    qos: int = 2
    """The QoS of every message that it publishes, on the neighbours' brokers and on its own."""
    reply_delay_s: float = 0.05
    """The seconds from the first copy of an announcement until the member answers its parents. The
    R lowest ids of the nearest neighbours are then its parents, whichever copy came first. 0: it
    answers each at once, as published."""
    hops_max: int = 32
    payload_bytes_max: int = 1 << 20
    """The most bytes of a payload. A longer publication does not leave its broker."""
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
        if not 0 <= self.reply_delay_s < self.core_ann_interval_s:
            raise BadConfig(
                f"reply_delay_s is {self.reply_delay_s}: it must be 0 or more, and less than "
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
