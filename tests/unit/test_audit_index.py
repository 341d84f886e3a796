"""The index of the audit, on a disk that does not take it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from holdfast.api.access.audit import INDEX, AuditEntry, AuditLog
from holdfast.security.dynamic.commands import CommandOutcome, SecurityChange
from holdfast.server.event_loop.broker import Broker
from holdfast.storage.record import CONTROL, Record


class CommittingAudit(AuditLog):
    """An audit whose records are committed at once."""

    async def _store(self, broker: Broker, entry: AuditEntry) -> tuple[Record, str]:
        return Record(0, CONTROL, timestamp_us=entry.time_us), ""


def test_a_command_is_answered_although_the_index_is_not_written(tmp_path: Path) -> None:
    """The record is in the log. A failure of the task would stop the broker."""
    (tmp_path / INDEX).mkdir()
    state = SimpleNamespace(config=SimpleNamespace(node_id="n1"))
    broker = cast(Broker, SimpleNamespace(node=SimpleNamespace(state=state)))
    unexpected: list[dict[str, Any]] = []

    async def record() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: unexpected.append(each))
        audit = CommittingAudit(lambda: broker, lambda: 0, tmp_path)
        answered = asyncio.Event()
        outcome = CommandOutcome({"command": "deleteRole"}, True, "r")
        audit.record_changes([SecurityChange("c", "u", "192.0.2.7:1", outcome)], answered.set)
        async with asyncio.timeout(5):
            await answered.wait()

    asyncio.run(record())
    assert not unexpected
