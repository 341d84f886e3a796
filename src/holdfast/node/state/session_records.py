"""Sessions and shared groups as JSON: the SESSION records of the log, and the entries of snapshots.

Entries also go between nodes. Fields without a value are left out where older versions did so. All
of these types are told apart by `op`, or by where they are.
"""

from typing import Final, TypeVar, get_args

from msgspec import UNSET, DecodeError, Struct, UnsetType, ValidationError, json

from holdfast.node.session.additions import DRAINS, LOG_READER, code_of
from holdfast.node.session.session import Replay, Session, Subscription, Will
from holdfast.node.session.state import CursorState, decode_cursor

T = TypeVar("T")

SubscriptionRow = tuple[str, int, bool, bool, int, int]
"""Filter, QoS, No Local, Retain As Published, Retain Handling, and the code of the additions, which
is the subscription identifier or 0 if the client asked for nothing else."""
EntryRow = tuple[str, int, bool, bool, int, int, list[int] | None]
"""A SubscriptionRow and `Subscription.start`."""


def subscription_row(subscription: Subscription) -> SubscriptionRow:
    """The subscription as SESSION records contain it."""
    code = code_of(subscription.additions)
    if subscription.reads_log:
        code |= LOG_READER
    if subscription.drains:
        code |= DRAINS
    return (
        subscription.filter,
        subscription.qos,
        subscription.no_local,
        subscription.retain_as_published,
        subscription.retain_handling,
        code,
    )


class WillEntry(Struct):
    """A will. `payload` and `properties` are Base64 in JSON."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: bytes
    expiry_s: int
    delay_s: int

    def will(self) -> Will:
        return Will(
            self.topic.encode(),
            self.payload,
            self.qos,
            self.retain,
            self.properties,
            self.expiry_s,
            self.delay_s,
        )


def will_entry(will: Will) -> WillEntry:
    """The entry of a will."""
    return WillEntry(
        will.topic.decode(),
        will.payload,
        will.qos,
        will.retain,
        will.properties,
        will.expiry_s,
        will.delay_s,
    )


class OpenRecord(Struct, tag_field="op", tag="open", omit_defaults=True):
    """A connection opens the session. In a cluster `owner` is the node that the client is connected
    to, `request` the number of that node's request, and `generation` that of the log."""

    client: str
    epoch: int
    expiry_s: int
    clean: bool
    username: str | None
    # Older versions also recorded names without proof, and do not have the field.
    proved: bool = False
    owner: str = ""
    request: int = 0
    will: WillEntry | None = None
    generation: int = 0


class CloseRecord(Struct, tag_field="op", tag="close", omit_defaults=True):
    """The session has no connection. `will`: one is due. `maybe_sent`: it was sent messages that
    its logged cursor does not cover."""

    client: str
    expiry_s: int
    will: bool
    maybe_sent: bool = False


class EndRecord(Struct, tag_field="op", tag="end"):
    """The session has ended."""

    client: str


class ReplayEntry(Struct, omit_defaults=True):
    """A start in the past: `Subscription.start` and `Subscription.replay`."""

    start: list[int]
    seam: list[int]
    floors: dict[str, int] = {}
    again: list[tuple[int, int]] = []


def replay_entries(session: Session) -> dict[str, ReplayEntry] | UnsetType:
    """The replays of a session by filter; UNSET without one."""
    entries: dict[str, ReplayEntry] = {}
    for each in session.subscriptions.values():
        if each.replay is not None and each.start is not None:
            entries[each.filter] = replay_entry(each.start, each.replay)
    return entries or UNSET


def replay_entry(start: list[int], replay: Replay) -> ReplayEntry:
    """The entry of a replay."""
    floors = {topic.decode(): floor for topic, floor in replay.floors.items()}
    return ReplayEntry(start, replay.seam, floors, sorted(replay.again or ()))


def restore_replays(
    session: Session,
    replays: dict[str, ReplayEntry] | UnsetType,
    partitions: int,
    positions: list[int] | UnsetType = UNSET,
) -> None:
    """Lets the session's subscriptions begin where the entries say. `positions`: where the session
    was when they were made, unless the session's own say it all.

    Raises `ValueError` if a list does not have an offset for each of the `partitions`.
    """
    if replays is UNSET:
        return
    lists = [each for entry in replays.values() for each in (entry.start, entry.seam)]
    if positions is not UNSET:
        lists.append(positions)
    for each in lists:
        if len(each) != partitions:
            raise ValueError(f"a replay of {len(each)} partitions, there are {partitions}")
    if positions is not UNSET:
        go_back(session, list(positions), [entry.start for entry in replays.values()])
    for filter, entry in replays.items():
        subscription = session.subscriptions.get(filter)
        if subscription is not None:
            floors = {topic.encode(): floor for topic, floor in entry.floors.items()}
            subscription.start = list(entry.start)
            subscription.replay = Replay(list(entry.seam), floors, set(entry.again) or None)
            # Records of older versions do not say it.
            subscription.reads_log = True
            session.has_starts = True


def go_back(session: Session, positions: list[int], starts: list[list[int]]) -> None:
    """Lets the session read the log from the starts on. Its present subscriptions apply from
    `positions` on, where it is."""
    shared: dict[int, list[int]] = {}
    for subscription in session.subscriptions.values():
        before = subscription.start
        if subscription.group is not None:
            continue
        if before is None:
            subscription.start = positions
        else:
            raised = shared.get(id(before))
            if raised is None:
                raised = list(map(max, before, positions))
                shared[id(before)] = raised
            subscription.start = raised
    lowest = list(positions)
    for start in starts:
        lowest = list(map(min, lowest, start))
    session.has_starts = True
    session.positions = lowest
    session.tailing = False
    session.outbox = None
    session.outbox_bytes = 0


class SubscribeRecord(Struct, tag_field="op", tag="subscribe"):
    """The session subscribes. `start`: the offset per partition from which that applies. `replays`:
    by filter, the subscriptions that begin in the past. The session's position goes back to their
    starts, and its other subscriptions apply from `positions`, where it was. `owed`: the filters
    whose retained sets are not empty, so that they are to be sent if Retain Handling says so."""

    client: str
    subscriptions: list[SubscriptionRow]
    start: list[int]
    positions: list[int] | UnsetType = UNSET
    replays: dict[str, ReplayEntry] | UnsetType = UNSET
    owed: list[str] | UnsetType = UNSET


class UnsubscribeRecord(Struct, tag_field="op", tag="unsubscribe"):
    """The session unsubscribes."""

    client: str
    filters: list[str]


class RetainedRecord(Struct, tag_field="op", tag="retained"):
    """Retained sets were sent up to the topics of `sent`, by filter; None: completely. `seam` is
    `OwedRetained.seam` of all of them. Older versions ignore the record, and send no rest."""

    client: str
    sent: dict[str, str | None]
    seam: list[int] | UnsetType = UNSET


class ReserveRecord(Struct, tag_field="op", tag="reserve"):
    """The leader of the partition may give sessions the epochs up to `epoch`, and later leaders
    give higher ones. `client` is "". Older versions ignore the record."""

    client: str
    epoch: int


class QueueRecord(Struct, tag_field="op", tag="queue", omit_defaults=True):
    """A queue begins at the offsets `start`, unless there is one with this key. `client` is the
    key, `creator` the client that asked for it, `owner` its user, `past` as `Keeper.is_past`. Older
    versions ignore the record."""

    client: str
    start: list[int]
    creator: str = ""
    owner: str = ""
    past: bool = False


class MemberRecord(Struct, tag_field="op", tag="member", omit_defaults=True):
    """A durable session joins a shared group, or (`left`) has left it. `client` is the group's key,
    so that the record is in the group's home partition. Its sequence is the session's epoch.
    Older versions ignore the record."""

    client: str
    member: str
    left: bool = False


class MembersRecord(Struct, tag_field="op", tag="members"):
    """From here on, every durable member of a group with this home partition has a MemberRecord in
    it. `client` is "". Older versions ignore the record."""

    client: str


class UnknownRecord(Struct):
    """A change that a later version knows, which is ignored."""

    op: str
    client: str


KnownRecord = (
    OpenRecord
    | CloseRecord
    | EndRecord
    | SubscribeRecord
    | UnsubscribeRecord
    | RetainedRecord
    | ReserveRecord
    | QueueRecord
    | MemberRecord
    | MembersRecord
)
SessionRecord = KnownRecord | UnknownRecord

SESSION_OPENED: Final = b'{"op":"open",'
"""The first bytes of each OpenRecord, and of no other record of a session."""
EPOCHS_RESERVED: Final = b'{"op":"reserve",'
"""The first bytes of each ReserveRecord, and of no other record of a session."""
LEADER_DECIDED: Final = (SESSION_OPENED, EPOCHS_RESERVED)
"""The beginnings of SESSION records that only the leader appends that has decided them."""


class SessionEntry(Struct, kw_only=True):
    """A whole session. `cursor` is the payload of a CURSOR record, and `done` the finished offsets
    that have no room in it. `born`, `requests`, `maybe_sent` and `trusted` are those of
    `node.state.replicated`. `owed`: the retained sets by filter, each with `OwedRetained.after`
    and `seam`; `passed`: `owed_inflight` of the session; `past`: `Keeper.is_past`."""

    client: str
    epoch: int
    expiry_s: int
    username: str | None
    proved: bool = False
    disconnected_us: int
    open: bool
    owner: str = ""
    subscriptions: list[EntryRow]
    inbound: list[tuple[int, int]]
    cursor: bytes
    done: list[tuple[int, int]] | UnsetType = UNSET
    will: WillEntry | UnsetType = UNSET
    born: int | UnsetType = UNSET
    requests: list[int] | UnsetType = UNSET
    maybe_sent: bool | UnsetType = UNSET
    replays: dict[str, ReplayEntry] | UnsetType = UNSET
    doubtful: list[int] | UnsetType = UNSET
    trusted: tuple[int, int] | UnsetType = UNSET
    owed: dict[str, tuple[str, list[int] | None]] | UnsetType = UNSET
    passed: list[tuple[int, int]] | UnsetType = UNSET
    past: bool | UnsetType = UNSET

    @property
    def may_be_sent(self) -> bool:
        """Whether messages beyond the cursor may have been sent. An entry that does not say it
        counts as one."""
        return self.maybe_sent is not False


def open_record(session: Session, clean: bool, owner: str = "", request: int = 0) -> OpenRecord:
    """The record of a new connection."""
    return OpenRecord(
        session.client_id,
        session.epoch,
        session.expiry_s,
        clean,
        session.username,
        session.is_owned,
        owner,
        request,
        None if session.will is None else will_entry(session.will),
    )


class GroupEntry(Struct, omit_defaults=True):
    """A shared group. `given`: the (partition, offset) of assigned records, of a single broker.
    `done`: per partition the finished offsets, and `epoch` that of the home, of a cluster.
    `ranges`: per partition the first offsets and ends of finished ranges, where `done` has too
    little room. Older versions ignore them."""

    key: str
    positions: list[int]
    given: list[tuple[int, int]] = []
    done: list[tuple[int, list[int]]] = []
    epoch: int = 0
    ranges: list[tuple[int, list[tuple[int, int]]]] = []


encode_session: Final = json.Encoder().encode
"""Encode a SessionRecord, a SessionEntry or a GroupEntry."""
_KNOWN_OPS: Final = {each.__struct_config__.tag for each in get_args(KnownRecord)}
_RECORD: Final[json.Decoder[KnownRecord]] = json.Decoder(KnownRecord)
_UNKNOWN: Final = json.Decoder(UnknownRecord)
_ENTRY: Final = json.Decoder(SessionEntry)


_GROUP: Final = json.Decoder(GroupEntry)


def decode_json(decoder: json.Decoder[T], data: bytes, what: str) -> T:
    """A JSON entry of a snapshot, or of another node. A malformed one raises `ValueError`."""
    try:
        return decoder.decode(data)
    except (DecodeError, RecursionError) as error:
        raise ValueError(f"{what} that cannot be read: {error}") from None


def decode_record(payload: bytes) -> SessionRecord:
    """The payload of a SESSION record. A malformed one raises `ValueError`."""
    try:
        try:
            return _RECORD.decode(payload)
        except ValidationError:
            unknown = _UNKNOWN.decode(payload)
            if unknown.op in _KNOWN_OPS:
                raise
            return unknown
    except (DecodeError, RecursionError) as error:
        raise ValueError(f"a record of a session that cannot be read: {error}") from None


def decode_entry(data: bytes) -> SessionEntry:
    """The entry of a session. A malformed one raises `ValueError`."""
    return decode_json(_ENTRY, data, "a session")


def cursor_of(entry: SessionEntry, partitions: int) -> CursorState:
    """The progress of a session in a log with so many partitions. A malformed one raises
    `ValueError` or `struct.error`."""
    cursor = decode_cursor(entry.cursor, partitions)
    if entry.done is not UNSET:
        cursor.done += entry.done
    places = [*cursor.done, *((partition, 0) for _, partition in entry.inbound)]
    if not all(0 <= partition < partitions for partition, _ in places):
        raise ValueError("a session with a partition that the log does not have")
    return cursor


def decode_group(data: bytes, partitions: int) -> GroupEntry:
    """The entry of a shared group of a log with so many partitions. A malformed one raises
    `ValueError`."""
    entry = decode_json(_GROUP, data, "a shared group")
    if len(entry.positions) != partitions:
        raise ValueError(f"a shared group with {len(entry.positions)} positions")
    if not all(
        0 <= partition < partitions for partition, _ in (*entry.given, *entry.done, *entry.ranges)
    ):
        raise ValueError("a shared group with records of a partition that the log does not have")
    return entry
