"""Delivery of the federation's messages to this member's clients."""

from typing import Protocol

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import DeliverLocally, Dropped, Message
from holdfast_federation.core.frames import Data, Skip
from holdfast_federation.core.routing.interest import LocalInterest


class RetainedVersions(Protocol):
    def is_newest(self, data: Data, now: float) -> bool:
        """Returns whether its version is the newest of the topic."""

    def delivered(self, data: Data, now: float) -> None:
        """Handles the delivery of a newest version."""


class LocalDelivery:
    """The step from a message for this member to a `DeliverLocally` effect."""

    def __init__(
        self,
        context: MemberContext,
        interest: LocalInterest,
        retained: RetainedVersions,
    ) -> None:
        self._own = context.node
        self._interest = interest
        self._retained = retained
        self._effects = context.effects

    def accepts(self, data: Data | Skip) -> bool:
        """Returns whether all groups of its grant exist here. If one does not, the stream does not
        pass the place, so the origin keeps the message until another member has it."""
        if isinstance(data, Skip):
            return True
        return all(self._interest.has(share) for share in self._granted(data)[1])

    def deliver(self, data: Data | Skip, place: int, now: float) -> bool:
        """Delivers a message, or drops it. Returns whether the driver has something to store."""
        if isinstance(data, Skip):
            return self._drop("withheld", data)
        is_plain, shares = self._granted(data)
        if data.expiry_s == 0.0:
            return self._drop("expired", data)
        if not is_plain and not shares:
            return self._drop("another has the group", data)
        if not self._interest.matches(data.topic):
            return self._drop("unwanted", data)
        is_retained = data.is_retained and is_plain
        is_version = is_retained and data.stamp > 0
        if is_version:
            is_retained = self._retained.is_newest(data, now)
        granted = tuple(shares) if self._interest.announces_groups() else None
        message = message_of(data, is_retained)
        self._effects.append(
            DeliverLocally(data.id, message, place, data.hops, is_plain, granted, data.is_regranted)
        )
        if is_version and is_retained:
            self._retained.delivered(data, now)
        return True

    def _drop(self, reason: str, data: Data | Skip) -> bool:
        self._effects.append(Dropped(reason, data.id, self._own))
        return False

    def _granted(self, data: Data) -> tuple[bool, list[str]]:
        for node, is_plain, shares in data.grants:
            if node == self._own:
                return is_plain, shares
        return True, []


def message_of(data: Data, is_retained: bool) -> Message:
    return Message(
        data.topic,
        data.payload,
        data.qos,
        is_retained,
        data.properties,
        data.expiry_s,
        data.id,
        data.stamp,
    )
