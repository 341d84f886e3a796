"""Replicates retained messages in the whole federation: the newest version of a topic wins.

A publication with RETAIN gets a stamp at its origin and keeps it on every path. A replay to a
member that was away, or is newly interested in the topic, is never a publication. An empty payload
is a version, too: a tombstone, which is kept for `tombstone_s`. Stamps need wall time. A member
without it takes no part, and messages pass through it unchanged.
"""

from typing import Final

from msgspec.structs import replace

from holdfast_federation.core.context import MemberContext
from holdfast_federation.core.effects import Message, RetainLocally
from holdfast_federation.core.frames import Data, Retained, RetainedMessage, decode
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.custody import BadEntry
from holdfast_federation.core.retained.clock import (
    AHEAD_MAX_S,
    UNKNOWN_AGE,
    HybridClock,
    version_of,
)
from holdfast_federation.core.retained.store import RetainedStore

GIVEN_S: Final = 5.0
"""The seconds after which a message that was passed to the broker has certainly arrived there."""


class RetainedReplication:
    """The versions that this member accepts, and the messages that its broker receives for them."""

    def __init__(
        self,
        context: MemberContext,
        store: RetainedStore,
        clock: HybridClock,
    ) -> None:
        self._own = context.node
        self._config = context.config
        self._store = store
        self._clock = clock
        self._counts = context.counts
        self._effects = context.effects
        # By topic: the time at which the broker last received a version of it.
        self._delivered_at: dict[str, float] = {}

    def load(self, stored: list[bytes], now: float) -> None:
        """Loads what `StoreRetained` stored. Raises BadFrame or BadEntry when it is malformed."""
        for data in stored:
            frame = decode(data)
            if not isinstance(frame, Retained):
                raise BadEntry("a stored retained message is none: delete it from the store")
            for message in frame.messages:
                self._clock.observe(message.version[0], now)
                if not self._store.put(message, now):
                    self._counts["retained full"] += 1

    def set_wall(self, wall_s: float, now: float) -> list[str]:
        """Sets the wall clock. Returns the topics whose version has changed because of it."""
        return self._stepped(self._clock.set_wall(wall_s, now), now)

    def peer_clock(self, peer: bytes, wall_s: float, now: float) -> list[str]:
        """Sets a linked member's clock. Returns the topics as `set_wall` does."""
        return self._stepped(self._clock.set_peer(peer, wall_s, now), now)

    def _stepped(self, step_s: float, now: float) -> list[str]:
        """Corrects the stamps that a wrong clock has given.

        A publication of this member gets the stamp that it would have had. A version of another
        member is dropped. It comes again from there, with a valid stamp.
        """
        if abs(step_s) <= AHEAD_MAX_S:
            return []
        wall_us = self._clock.wall_us(now)
        wrong = [
            message
            for message in self._store.matching("#", "")
            if self._clock.is_of_no_time(message.version[0], now)
        ]
        for message in wrong:
            stamp, origin, epoch, sequence = message.version
            self._store.remove(message.topic)
            if origin == self._own:
                # For a publication of an earlier run it is unknown how long ago it was.
                shifted = min(max(stamp + int(step_s * 1e6), UNKNOWN_AGE + 1), wall_us)
                self._accept(replace(message, version=(shifted, origin, epoch, sequence)), now)
        self._counts["stamps corrected"] += len(wrong)
        return [message.topic for message in wrong]

    # Publications

    def publish(self, id: MessageId, message: Message, now: float) -> int:
        """Accepts a publication of a client here. Returns its stamp."""
        stamp = self._clock.stamp(now)
        retained = self._retained(id, message, stamp, now)
        self._accept(retained, now)
        is_given = now - self._delivered_at.get(message.topic, -GIVEN_S) < GIVEN_S
        if is_given or message.is_replaced:
            # The earlier version may have reached the broker after this publication, which is the
            # newer one. Without the replay the broker would keep the older.
            self._replay(retained, now, may_wait=not is_given)
        return stamp

    def broker_has(self, id: MessageId, message: Message, now: float) -> bool:
        """Accepts a message that the broker has retained before this member ran, or while no other
        member was interested. Returns True if it is a new version.

        The federation's version wins, and the broker receives it, unless the message is known to
        have been published later (`stamp`).
        """
        held = self._store.get(message.topic)
        if held is not None and held.version[0] < message.stamp:
            self._clock.observe(message.stamp, now)
            self._accept(self._retained(id, message, message.stamp, now), now)
            return True
        if held is None:
            if message.payload:
                self._accept(self._retained(id, message, UNKNOWN_AGE, now), now)
            return bool(message.payload)
        if held.payload != message.payload:
            # A difference in anything but the payload is the broker's own change. Replaying for it
            # would publish the same message again at every start.
            self._replay(held, now)
        return False

    def is_newest(self, data: Data, now: float) -> bool:
        """True if no newer version is here and the stamp is acceptable."""
        held = self._store.get(data.topic)
        if held is not None and held.version > version_of(data.stamp, data.id):
            return False
        if self._clock.observe(data.stamp, now):
            return True
        self._counts["stamp ahead"] += 1
        return False

    def delivered(self, data: Data, now: float) -> None:
        """Accepts a publication of another member that the broker has received."""
        self._delivered_at[data.topic] = now
        self._accept(self._of_data(data, now), now)

    def missed(self, data: Data, now: float) -> None:
        """Accepts a QoS 0 publication that arrived too late to be delivered. It may still be the
        newest retained message."""
        self.merge(self._of_data(data, now), now)

    # Replays

    def merge(self, message: RetainedMessage, now: float) -> RetainedMessage | None:
        """Accepts a version that is newer than the one here and wanted, or published here before.
        Returns the version here if that one is newer."""
        held = self._store.get(message.topic)
        if held is not None and held.version >= message.version:
            return held if held.version > message.version else None
        if held is None and not self._store.is_wanted(message.topic):
            return None
        ends_us = self._store.ends_us(message)
        if ends_us is not None and ends_us <= self._clock.wall_us(now):
            return None
        if not self._clock.observe(message.version[0], now):
            self._counts["stamp ahead"] += 1
            return None
        if self._store.put(message, now):
            if held is not None or message.payload:
                self._replay(message, now)
            self._store.store(message)
        else:
            self._counts["retained full"] += 1
        return None

    def tidy(self, now: float) -> None:
        """Removes the expired messages, and those that no filter has wanted for long."""
        self._delivered_at = {
            topic: at for topic, at in self._delivered_at.items() if now - at < GIVEN_S
        }
        for message in self._store.tidy(now, self._clock.wall_us(now)):
            # The broker removes it, too, because it would not hear of a later version.
            if message.payload:
                nothing = Message(message.topic, b"", message.qos, True)
                self._effects.append(RetainLocally(_id(message), nothing))

    def _accept(self, message: RetainedMessage, now: float) -> None:
        if self._store.put(message, now):
            self._store.store(message)
        else:
            self._counts["retained full"] += 1

    def _replay(self, held: RetainedMessage, now: float, may_wait: bool = False) -> None:
        self._delivered_at[held.topic] = now
        expiry_s = None
        if held.expires_us is not None:
            expiry_s = max(0.0, (held.expires_us - self._clock.wall_us(now)) / 1e6)
        message = Message(
            held.topic,
            held.payload,
            held.qos,
            True,
            held.properties,
            expiry_s,
            _id(held),
            held.version[0],
        )
        self._effects.append(RetainLocally(_id(held), message, may_wait))

    def _of_data(self, data: Data, now: float) -> RetainedMessage:
        return RetainedMessage(
            data.topic,
            data.payload,
            data.qos,
            data.properties,
            self._expires_us(data.expiry_s, now),
            version_of(data.stamp, data.id),
        )

    def _retained(self, id: MessageId, message: Message, stamp: int, now: float) -> RetainedMessage:
        return RetainedMessage(
            message.topic,
            message.payload,
            message.qos,
            message.properties,
            self._expires_us(message.expiry_s, now),
            version_of(stamp, id),
        )

    def _expires_us(self, expiry_s: float | None, now: float) -> int | None:
        return None if expiry_s is None else self._clock.wall_us(now) + int(expiry_s * 1e6)


def _id(message: RetainedMessage) -> MessageId:
    return MessageId(*message.version[1:])
