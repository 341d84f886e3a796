"""What a federator counts, since its start."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from holdfast.federation.core.effects import Dropped
from holdfast.federation.core.frames import CONTROL, KINDS, Data
from holdfast.server.peers.complaints import Complaints

_DATA: Final = next(number for number, kind in KINDS.items() if kind is Data)
LOSSES: Final = ("queue full", "too old", "member left", "member gone")
"""Worth a line in the log, once a minute for each destination."""


@dataclass(slots=True)
class Counters:
    delivered: int = 0
    """To the edge, first deliveries only."""
    control_frames: int = 0
    control_bytes: int = 0
    data_frames: int = 0
    """Messages and their confirmations."""
    data_bytes: int = 0
    data_copies: int = 0
    """Those of `data_frames` that are messages: one for each link."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages of QoS 0, or destinations of others, by reason."""
    hops: Counter[int] = field(default_factory=Counter)
    """Links behind messages that were delivered here."""

    def sent(self, frame: bytes) -> None:
        if frame[1] in CONTROL:
            self.control_frames += 1
            self.control_bytes += len(frame)
        else:
            self.data_frames += 1
            self.data_bytes += len(frame)
            self.data_copies += frame[1] == _DATA

    def lost(self, effect: Dropped, complaints: Complaints) -> None:
        self.dropped[effect.reason] += 1
        if effect.reason in LOSSES:
            destination = effect.destination.hex() if effect.destination else "nobody"
            count = self.dropped[effect.reason]
            text = f"messages for {destination} are lost: {effect.reason}, {count} so far"
            complaints.say(f"{effect.reason} {destination}", effect.reason, text)
