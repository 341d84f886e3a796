"""Counters of a federator since its start."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from holdfast.federation.core.effects import Dropped
from holdfast.federation.core.frames import KINDS, Data
from holdfast.io.peers.complaints import Complaints

CONTROL: Final = frozenset((1, 2, 3, 6, 8, 9, 11, 13))
"""The kinds of frames that carry no message."""
_DATA: Final = next(number for number, kind in KINDS.items() if kind is Data)
LOSSES: Final = ("queue full", "too old", "member left", "member gone")
"""Reasons of loss that are logged, at most once a minute for each destination."""


@dataclass(slots=True)
class Counters:
    """The counts of frames, deliveries and losses of one federator."""

    delivered: int = 0
    """Messages delivered to the edge, without repetitions."""
    control_frames: int = 0
    control_bytes: int = 0
    data_frames: int = 0
    """Frames with messages and their confirmations."""
    data_bytes: int = 0
    data_copies: int = 0
    """The part of `data_frames` with messages: one frame for each link."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Lost messages of QoS 0, or lost destinations of other messages, by reason."""
    hops: Counter[int] = field(default_factory=Counter)
    """Messages delivered here, by the number of links that they crossed."""

    def sent(self, frame: bytes) -> None:
        """Counts a frame that was sent."""
        if frame[1] in CONTROL:
            self.control_frames += 1
            self.control_bytes += len(frame)
        else:
            self.data_frames += 1
            self.data_bytes += len(frame)
            self.data_copies += frame[1] == _DATA

    def count_lost(self, effect: Dropped, complaints: Complaints) -> None:
        """Counts a lost message, and logs the reasons that an operator should know."""
        self.dropped[effect.reason] += 1
        if effect.reason in LOSSES:
            destination = effect.destination.hex() if effect.destination else "nobody"
            count = self.dropped[effect.reason]
            text = f"messages for {destination} are lost: {effect.reason}, {count} so far"
            complaints.say(f"{effect.reason} {destination}", effect.reason, text)
