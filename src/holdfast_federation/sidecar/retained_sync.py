"""Keeps retained messages equal in the member, the broker and the store.

- The broker has a message before the store records it as retained. In the opposite order, a crash
  would leave a version in the store that the broker lacks. The member would take that for a
  removal.
- Whenever the broker connects, the member receives every message found there, and an empty one for
  each topic that only the store has. The member then decides what the broker must retain. A message
  that a reading could not find is not reported as absent: the member would have the broker replace
  a newer one. A reading that failed is repeated.
- For each topic the broker receives one change at a time, the newest last.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

from holdfast_federation.core.effects import DeleteRetained, Message, RetainLocally, StoreRetained
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.retained.clock import HybridClock
from holdfast_federation.sidecar.edge import RetainedFound, RetainingEdge
from holdfast_federation.sidecar.status import clock_problem
from holdfast_federation.sidecar.store.store import MemberStore

logger = logging.getLogger("holdfast")

CLOCK_S: Final = 60.0
"""The interval in seconds in which the member receives the wall clock."""
MAY_WAIT_S: Final = 2.0
"""The delay in seconds of changes that may wait.

A publication that the broker is about to hand over arrives within this time.
"""
READ_AGAIN_S: Final = 5.0
"""The delay in seconds before a failed reading of the broker is repeated."""
TOLD_MAX: Final = 500
"""The most messages found in the broker that the member receives in one turn of the loop."""

Call = Callable[[Callable[[FederationMember, float], None]], None]
"""Applies a function to the member and carries out the effects."""


class _Setting:
    """A topic whose current version the broker does not have yet."""

    def __init__(self, effect: RetainLocally) -> None:
        self.effect = effect
        self.unconfirmed: RetainLocally | None = None
        """The change that the broker has not confirmed yet."""
        self.is_stored = False
        """Whether `data` waits to be stored."""
        self.data: bytes | None = None


class RetainedSync:
    """Exchanges retained messages between one edge, its member and its store."""

    def __init__(
        self, edge: RetainingEdge, store: MemberStore, stored: Iterable[str], call: Call
    ) -> None:
        """`stored`: the topics that the store has a version of."""
        self._edge = edge
        self._store = store
        self._call = call
        self._topics = set(stored)
        self._settings: dict[str, _Setting] = {}
        self._wanted: frozenset[str] = frozenset()
        # Counts the connections of the broker: late replies of an earlier one are ignored.
        self._generation = 0
        self._is_up = False
        self._is_stopped = False
        self._complained = (False, False)
        self._clock: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._report_clock()

    def stop(self) -> None:
        self._is_stopped = True
        self._is_up = False
        if self._clock is not None:
            self._clock.cancel()

    @property
    def waiting(self) -> int:
        """The number of topics with a change that the broker has not confirmed."""
        return len(self._settings)

    # The broker

    def _complain(self, clock: HybridClock) -> None:
        """Logs a problem of the clock once, until it changes."""
        state = (clock.is_wrong, clock.is_disputed)
        if state != self._complained:
            self._complained = state
            if any(state):
                logger.error("federation_clock_wrong text=%r", clock_problem(clock))
            else:
                logger.info("federation_clock_agrees")

    def up(self) -> None:
        """Gives all pending changes to the broker again, and compares its retained messages.

        Replies of the earlier connection are lost, so every pending change counts as unconfirmed.
        """
        self._is_up = True
        self._generation += 1
        for setting in list(self._settings.values()):
            self._set_in_broker(setting)
        missing = set(self._topics)

        def report(found: RetainedFound) -> None:
            missing.difference_update(message.topic for message in found.messages)
            absent = sorted(missing) if found.is_complete else ()
            self._report([*found.messages, *(Message(topic, b"", 1, True) for topic in absent)])

        self._read(frozenset("#"), report, self._generation)

    def down(self) -> None:
        """Stops giving changes to the broker. They stay pending until `up`."""
        self._is_up = False

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        """Replaces what others want, and reads what the broker has retained under new filters."""
        new, self._wanted = filters - self._wanted, filters
        if new and self._is_up:
            self._read(new, lambda found: self._report(found.messages), self._generation)

    def removed(self, removals: Mapping[str, int]) -> None:
        """Passes on removals by the broker's clients, with their times in wall microseconds.

        A topic without a stored version is skipped: the federation has no message of it that could
        return.
        """
        if self._is_up:
            known = self._topics.intersection(removals)
            self._report([Message(t, b"", 1, True, stamp=removals[t]) for t in sorted(known)])

    def _read(
        self, filters: frozenset[str], report: Callable[[RetainedFound], None], generation: int
    ) -> None:
        def is_current() -> bool:
            return self._is_up and generation == self._generation

        def done(found: RetainedFound | None) -> None:
            if found is None:
                asyncio.get_running_loop().call_later(READ_AGAIN_S, begin)
            elif is_current():
                report(found)

        def begin() -> None:
            if is_current():
                self._edge.read_retained(filters, done)

        begin()

    def _report(self, messages: list[Message]) -> None:
        self._report_batch(iter(messages), self._generation)

    def _report_batch(self, messages: Iterator[Message], generation: int) -> None:
        if not self._is_up or generation != self._generation:
            return
        some = list(islice(messages, TOLD_MAX))

        def report(member: FederationMember, now: float) -> None:
            for message in some:
                member.broker_has_retained(message, now)

        self._call(report)
        if some:
            loop = asyncio.get_running_loop()
            loop.call_soon(self._report_batch, messages, generation)

    # The member

    def carry_out(self, effect: RetainLocally | StoreRetained | DeleteRetained) -> None:
        """Carries out an effect of the member on the broker or the store."""
        if isinstance(effect, RetainLocally):
            self._retain(effect)
        elif isinstance(effect, StoreRetained):
            self._save(effect.topic, effect.data)
        else:
            self._save(effect.topic, None)

    def _retain(self, effect: RetainLocally) -> None:
        setting = self._settings.setdefault(effect.message.topic, _Setting(effect))
        setting.effect = effect
        if effect.may_wait:
            asyncio.get_running_loop().call_later(MAY_WAIT_S, self._set_late, setting, effect)
        elif self._is_up and setting.unconfirmed is None:
            self._set_in_broker(setting)

    def _set_late(self, setting: _Setting, effect: RetainLocally) -> None:
        is_current = self._settings.get(effect.message.topic) is setting
        if is_current and setting.effect is effect and setting.unconfirmed is None and self._is_up:
            self._set_in_broker(setting)

    def delivered(self, topic: str) -> None:
        """Drops a delayed change of a topic: a newer version was delivered as a publication.

        Given to the broker after it, the older version would replace the newer one.
        """
        setting = self._settings.get(topic)
        if setting is not None and setting.effect.may_wait and setting.unconfirmed is None:
            self._resolve(setting)

    def _save(self, topic: str, data: bytes | None) -> None:
        """Stores the version of a topic, or removes it if `data` is None."""
        if data is None:
            self._topics.discard(topic)
        else:
            self._topics.add(topic)
        setting = self._settings.get(topic)
        if setting is None:
            self._store.retain(topic, data)
        else:
            setting.is_stored, setting.data = True, data

    def _set_in_broker(self, setting: _Setting) -> None:
        setting.unconfirmed = effect = setting.effect
        generation = self._generation

        def done() -> None:
            if self._is_up and generation == self._generation and setting.unconfirmed is effect:
                self._confirmed(setting)

        self._edge.retain(effect.id, effect.message, done)

    def _confirmed(self, setting: _Setting) -> None:
        if setting.unconfirmed is not setting.effect:
            self._set_in_broker(setting)
            return
        setting.unconfirmed = None
        self._resolve(setting)

    def _resolve(self, setting: _Setting) -> None:
        topic = setting.effect.message.topic
        del self._settings[topic]
        if setting.is_stored:
            self._store.retain(topic, setting.data)

    def _report_clock(self) -> None:
        self._call(lambda member, now: member.wall_clock(time.time(), now))
        self._call(lambda member, now: self._complain(member.retained.clock))
        if not self._is_stopped:
            self._clock = asyncio.get_running_loop().call_later(CLOCK_S, self._report_clock)
