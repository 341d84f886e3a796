"""Bans in the log: their records, and their entries in snapshots.

A BAN record sets the ban of one scope and name, or without a payload lifts it. All records of one
name are in one partition, so the last one counts on every node. The entry of a snapshot, or of a
transfer between nodes, is the same JSON with scope and name.
"""

from collections.abc import Callable, Iterator

import msgspec

from holdfast.log.record import BAN, Record
from holdfast.node.admission.bans import Ban
from holdfast.node.features import BANS
from holdfast.node.node_state import CallbackPromise, NodeState
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.state_records import append_state


class BanEntry(msgspec.Struct, omit_defaults=True):
    """A ban as JSON. `scope` and `name` are left out in a record, whose key has them."""

    until_us: int
    reason: str = ""
    by: str = ""
    since_us: int = 0
    scope: str = ""
    name: str = ""


def record_ban(state: NodeState, ban: Ban, done: Callable[[str], None]) -> None:
    """Bans a name. `done` is called when the ban is durable, or with the reason of a failure."""
    older = state.cluster.older_nodes(BANS)
    if older:
        done(older)
        return
    payload = msgspec.json.encode(BanEntry(ban.until_us, ban.reason, ban.by, ban.since_us))
    _record(state, ban.scope, ban.name, payload, done)


def record_lift(state: NodeState, scope: str, name: str, done: Callable[[str], None]) -> None:
    """Lifts the ban of a name. `done`: see `record_ban`."""
    _record(state, scope, name, b"", done)


def _record(
    state: NodeState, scope: str, name: str, payload: bytes, done: Callable[[str], None]
) -> None:
    append_state(state, BAN, ban_key(scope, name), payload, 0, CallbackPromise(done))


def ban_key(scope: str, name: str) -> bytes:
    """The key of a ban's records, whose hash is their partition."""
    return f"{scope} {name}".encode()


def apply_ban(state: RecordedState, record: Record) -> None:
    """Applies a BAN record. Raises `ValueError` for one that is none."""
    scope, space, name = record.client_id.decode().partition(" ")
    if not space:
        raise ValueError("a ban without a name")
    if not record.payload:
        state.bans.lift(scope, name)
        return
    entry = decode_ban(record.payload)
    ban = Ban(scope, name, entry.until_us, entry.reason, entry.by, entry.since_us)
    state.bans.put(ban, state.wall_us)


def ban_entry(ban: Ban) -> bytes:
    """The entry of a ban in a snapshot."""
    return msgspec.json.encode(
        BanEntry(ban.until_us, ban.reason, ban.by, ban.since_us, ban.scope, ban.name)
    )


def restore_ban(state: RecordedState, data: bytes) -> None:
    """Loads an entry of a snapshot or of another node. Raises `ValueError` for one that is none."""
    entry = decode_ban(data)
    if not entry.scope:
        raise ValueError("the entry of a ban without a scope")
    ban = Ban(entry.scope, entry.name, entry.until_us, entry.reason, entry.by, entry.since_us)
    state.bans.put(ban, state.wall_us)


def present_bans(state: RecordedState) -> Iterator[Ban | None]:
    """The bans in force, and None for each that has ended. The table may change meanwhile."""
    for scope, name in state.bans.names():
        ban = state.bans.get(scope, name)
        yield None if ban is None or ban.is_over(state.wall_us) else ban


def decode_ban(data: bytes) -> BanEntry:
    """The ban of a payload or an entry. Raises `ValueError` for what is none."""
    try:
        return msgspec.json.decode(data, type=BanEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a ban that is none: {error}") from None
