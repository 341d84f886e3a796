"""The index of the audit, on a disk that does not take it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from holdfast.api.access.audit import INDEX, AuditEntry, AuditLog, fair_half
from holdfast.api.access.routes import AccessRoutes
from holdfast.api.admin import AdminRoutes
from holdfast.config.schema import Config
from holdfast.io.event_loop.broker import Broker
from holdfast.log.record import CONTROL, Record
from holdfast.security.dynamic.commands import CommandOutcome, SecurityChange


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


def test_a_full_index_keeps_those_of_callers_with_few() -> None:
    """Smallest counter-example: the oldest half goes. Then a caller with many takes the rest."""
    few = [(time_us, 0, 0, 1) for time_us in (1, 2, 3)]
    some = [(10 + time_us, 0, 0, 2) for time_us in range(20)]
    many = [(100 + time_us, 0, 0, 3) for time_us in range(200)]
    kept = fair_half(few + some + many, 100)
    assert kept == few + some + many[-77:]
    assert fair_half(many, 100) == many[-100:]
    assert fair_half(many + few, 4) == many[-2:] + few[-2:]
    equal = fair_half(some + [(time_us, 0, 0, 4) for time_us, *_ in some], 20)
    assert [each[3] for each in equal].count(4) == 10
    assert len(equal) == 20


def test_lines_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("5 1 7\n6 0 -1 99\nno line\n")
    audit = AuditLog(lambda: None, lambda: 0, tmp_path)
    assert audit._read() == [(5, 1, 7, 0), (6, 0, -1, 99)]
    audit._note([(7, 0, 1, 3)])
    again = AuditLog(lambda: None, lambda: 0, tmp_path)
    assert again._read() == [(5, 1, 7, 0), (6, 0, -1, 99), (7, 0, 1, 3)]


SECRET: dict[str, set[str]] = {
    "Login": {"password", "token"},
    "NewUser": {"password"},
    "UserChange": {"password"},
    # Payloads, and lists that `before` and `after` have.
    "PublishRequest": {
        "payload", "payload_base64", "content_type", "response_topic", "user_properties",
    },
    "RestoreRequest": {"deleted"},
}  # fmt: skip
"""The fields of bodies that the audit does not record."""


def test_the_audit_records_each_field_that_is_no_secret() -> None:
    """A new field is in one list or the other."""
    server = cast(Any, SimpleNamespace(cluster=None, broker=None, config=Config()))
    gate = cast(Any, SimpleNamespace(credentials=None))
    access = AccessRoutes(gate, AuditLog(lambda: None, lambda: 0, Path()))
    seen = set()
    for endpoint in AdminRoutes(server, access).endpoints():
        if endpoint.is_change and endpoint.body is not None:
            names = {each.name for each in msgspec.structs.fields(endpoint.body)}
            hidden = SECRET.get(endpoint.body.__name__, set())
            assert names - set(endpoint.audited) == hidden, endpoint.path
            seen.add(endpoint.body.__name__)
    assert seen > SECRET.keys()
    access.close()
