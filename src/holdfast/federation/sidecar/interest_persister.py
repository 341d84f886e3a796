"""Passes the interest of other members to the edge and the knowledge of them to the store."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from holdfast.federation.core.member import FederationMember
from holdfast.federation.sidecar.store.store import MemberStore

WANT_DELAY_S: Final = 0.05
"""The time in seconds in which changes of interest are gathered into one call of the edge."""
MEMORY_DELAY_S: Final = 0.5
"""The time in seconds by which the stored knowledge of other members may lag behind."""
REST: Final = 20.0
"""The smallest ratio of waiting to work for each pass over all that is known.

With many members and filters, changes are gathered for longer.
"""

Attempt = Callable[[Callable[[FederationMember, float], None]], None]
"""Works with the member, unless it has failed."""


class InterestPersister:
    """Writes the member's memory to the store and reports changed filters to the edge.

    The edge learns of new filters only after they are durable. Otherwise: the edge hands over a
    message for a new subscriber, and this process crashes. After the restart the member would not
    know the subscriber, and would acknowledge the repeated message as unwanted.
    """

    def __init__(
        self, attempt: Attempt, store: MemberStore, want: Callable[[frozenset[str]], None]
    ) -> None:
        self._attempt = attempt
        self._store = store
        self._want = want
        self._is_stopped = False
        self._want_timer: asyncio.TimerHandle | None = None
        self._memory_timer: asyncio.TimerHandle | None = None
        self._want_delay_s = WANT_DELAY_S
        self._memory_delay_s = MEMORY_DELAY_S
        self._wanted_version = -1
        self._wanted: frozenset[str] = frozenset()
        self._remembered_digest = b""

    def on_input(self, member: FederationMember) -> None:
        """Schedules work that is due. The federator calls this after any input of the member."""
        if self._is_stopped:
            return
        loop = asyncio.get_running_loop()
        if self._want_timer is None and member.remote_version != self._wanted_version:
            self._want_timer = loop.call_later(
                self._want_delay_s, self._attempt, self._report_wanted
            )
        if self._memory_timer is None and member.database.digest != self._remembered_digest:
            self._memory_timer = loop.call_later(
                self._memory_delay_s, self._attempt, self._remember
            )

    def stop(self) -> None:
        """Stops, and gives the store the final state."""
        self._is_stopped = True
        for timer in (self._want_timer, self._memory_timer):
            if timer is not None:
                timer.cancel()
        self._attempt(self._write)

    def _report_wanted(self, member: FederationMember, now: float) -> None:
        self._want_timer = None
        self._wanted_version = member.remote_version
        begin = time.monotonic()
        wanted = member.remote_filters()
        if wanted != self._wanted:
            self._wanted = wanted
            # Messages that the edge hands over for these filters must find them after any restart.
            self._write(member, now)
            self._store.when_written(lambda: self._pass_on(wanted))
        self._want_delay_s = max(WANT_DELAY_S, REST * (time.monotonic() - begin))

    def _pass_on(self, wanted: frozenset[str]) -> None:
        if not self._is_stopped:
            self._want(wanted)

    def _remember(self, member: FederationMember, now: float) -> None:
        self._memory_timer = None
        self._remembered_digest = member.database.digest
        begin = time.monotonic()
        self._write(member, now)
        self._memory_delay_s = max(MEMORY_DELAY_S, REST * (time.monotonic() - begin))

    def _write(self, member: FederationMember, now: float) -> None:
        self._store.remember(member.memory(now, time.time()))
