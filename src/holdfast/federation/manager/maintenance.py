"""The manager's periodic tasks: probes of members, removal of dead ones, announcements, and checks
of its database."""

import asyncio
import logging
from typing import Final

from holdfast.federation.manager.announcer import Schedule, announce_all
from holdfast.federation.manager.graph.round_trips import measured_ms
from holdfast.federation.manager.manager import Manager
from holdfast.federation.manager.state.federation_state import Member
from holdfast.federation.manager.state.store import StateStoreError

logger = logging.getLogger("holdfast.topology")

PROBES_AT_ONCE: Final = 32


class Rounds:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._schedule = Schedule()
        self.tasks: list[asyncio.Task[None]] = []
        """The running tasks. A task that ends without being cancelled has a defect."""

    def start(self) -> None:
        self.tasks = [
            asyncio.create_task(self._probe_for_ever()),
            asyncio.create_task(self._announce_for_ever()),
            asyncio.create_task(self._manager.changes.maintain(self._manager.adopted)),
        ]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def probe_all(self) -> None:
        """Probes all members once and removes the dead ones. Raises StateStoreError when the
        database fails."""
        manager = self._manager
        slots = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe(member: Member) -> tuple[Member, float | None]:
            async with slots:
                return member, await manager.brokers.round_trip_ms(member.ip, member.is_vouched)

        for member, trip_ms in await asyncio.gather(
            *(probe(each) for each in manager.state.members.values())
        ):
            if manager.state.members.get(member.id) != member:
                # It has left, or joined again, since.
                continue
            # A member that used to report and is silent does not live, whatever its broker does.
            is_silent = member.id in manager.reports and manager.reports.fresh(member.id) is None
            succeeded = measured_ms(trip_ms) is not None and not is_silent
            manager.health.probed(member.id, succeeded)
            manager.round_trips.add_measurement(member.id, trip_ms)
            manager.counts["probes_failed"] += not succeeded
        if manager.verdict().dead:
            await manager.remove_dead()

    async def _probe_for_ever(self) -> None:
        manager = self._manager
        while True:
            start = manager.clock()
            try:
                await self.probe_all()
            except StateStoreError as error:
                logger.error("not_repaired error=%r", str(error))
            interval_s = manager.settings.probe_interval_s
            await asyncio.sleep(max(0.0, start + interval_s - manager.clock()))

    async def announce_due(self) -> None:
        """Sends the announcements that are due. Raises StateStoreError when the database fails."""
        manager, state = self._manager, self._manager.state
        manager.changes.check_current()
        due = self._schedule.due(state.announcements, manager.clock())
        receivers = {each.receiver: state.members[each.receiver] for each in due}
        told = await announce_all(manager.brokers, receivers, due)
        enough = []
        for announcement in due:
            is_enough = self._schedule.sent(announcement, announcement in told, manager.clock())
            if is_enough and announcement.receiver not in manager.reports:
                enough.append(announcement)
        await manager.announced(enough)

    async def _announce_for_ever(self) -> None:
        manager = self._manager
        while True:
            changed = manager.changes.changed
            try:
                await self.announce_due()
            except StateStoreError as error:
                logger.error("not_announced error=%r", str(error))
            # What was read again after a loss is a change.
            is_waiting = manager.state.announcements and not manager.changes.unknown_because
            due = self._schedule.timer() if is_waiting else None
            pause_s = None if due is None else max(0.05, due - manager.clock())
            try:
                async with asyncio.timeout(pause_s):
                    await changed.wait()
            except TimeoutError:
                pass
