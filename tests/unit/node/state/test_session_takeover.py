"""A live session begins from the recorded one of its node, and shares nothing with it."""

import random
from operator import ge

from holdfast.node.config import NodeConfig
from holdfast.node.ownership.live_sessions import live_session
from holdfast.node.session.additions import LOG_READER
from holdfast.node.session.session import Inflight, Replay, Session
from holdfast.node.session.state import decode_cursor, encode_cursor, in_log_order
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import (
    ReplayEntry,
    SessionEntry,
    WillEntry,
    subscription_row,
)
from tests.support.journal_port import new_state
from tests.unit.node.test_images import Bench

FILTERS = ("a/+", "b/#", "c", "$share/g/d/+", "$share/h/e")


def offsets(draw: random.Random) -> list[int]:
    return [draw.randrange(50), draw.randrange(50)]


def drawn_inflight(draw: random.Random) -> dict[int, Inflight | None]:
    found: dict[int, Inflight | None] = {}
    for packet_id in draw.sample((1, 2, 3, 65_534, 65_535), draw.randrange(5)):
        entry = Inflight(draw.randrange(2), draw.randrange(50), 1 + draw.randrange(2), False)
        entry.is_retained = draw.random() < 0.3
        entry.group_tag = 0 if entry.is_retained else draw.choice((0, 0, 7))
        entry.state = 1 if entry.qos == 1 else 1 + draw.randrange(2)
        found[packet_id] = entry
    return found


def drawn_entry(draw: random.Random) -> SessionEntry:
    filters = draw.sample(FILTERS, draw.randrange(len(FILTERS) + 1))
    plain = [filter for filter in filters if filter[0] != "$"]
    replayed = [filter for filter in plain if draw.random() < 0.3]
    owed = {
        filter: (draw.choice(("", "a/m")), draw.choice((None, offsets(draw))))
        for filter in plain
        if draw.random() < 0.4
    }
    has_positions = draw.random() < 0.7
    entry = SessionEntry(
        client="c",
        epoch=5,
        expiry_s=draw.choice((60, 3600)),
        username=draw.choice((None, "u")),
        proved=draw.random() < 0.5,
        disconnected_us=draw.choice((0, 1_700_000_000_000_000)),
        open=True,
        owner="n1",
        subscriptions=[
            (
                filter,
                draw.randrange(3),
                draw.random() < 0.5,
                draw.random() < 0.5,
                draw.randrange(3),
                draw.choice((0, 9, LOG_READER)),
                draw.choice((None, offsets(draw))),
            )
            for filter in filters
        ],
        inbound=[],
        cursor=encode_cursor(
            list(enumerate(offsets(draw))) if has_positions else [],
            drawn_inflight(draw),
            [(0, draw.randrange(50)) for _ in range(draw.randrange(3))],
        ),
        born=draw.choice((1, 5)),
        requests=[3],
        maybe_sent=draw.random() < 0.5,
    )
    if draw.random() < 0.3:
        entry.will = WillEntry("w", b"gone", 1, True, b"", 5, 3)
    if replayed:
        entry.replays = {
            filter: ReplayEntry(offsets(draw), offsets(draw), {"a/b": 3}, [(1, 4)])
            for filter in replayed
        }
    if owed:
        entry.owed = owed
        entry.passed = draw.choice(([], [(0, 3)]))
    return entry


def picture(value: object, above: tuple[int, ...] = ()) -> object:
    """Everything that an object has, without names of functions and objects above it."""
    if id(value) in above:
        return "above"
    above = (*above, id(value))
    if isinstance(value, dict):
        return [(picture(key, above), picture(each, above)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [picture(each, above) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if type(value).__module__.startswith("holdfast."):
        names = [name for name in dir(value) if not name.startswith("__")]
        fields = [(name, getattr(value, name)) for name in names]
        return [(name, picture(each, above)) for name, each in fields if not callable(each)]
    return value


def taken(recorded: Session, images: ReplicatedState) -> tuple[Session, object]:
    """The live session of the recorded one, and the routes of its node."""
    config = NodeConfig(node_id="n1", partitions=2)
    state = new_state(config, images.state.journal)
    state.delivered = [45, 46]
    live = live_session(state, recorded)
    assert state.sessions == {"c": live}
    return live, (sorted(state.subscriptions.filters()), sorted(state.groups))


def drawn(seed: int) -> tuple[Bench, Session, SessionEntry]:
    draw = random.Random(seed)
    bench = Bench()
    entry = drawn_entry(draw)
    recorded = bench.images.restore(entry)
    # Timers and snapshots look at some sessions first.
    if draw.random() < 0.5:
        bench.images.entry(recorded)
    recorded.own_rare().replays_over = draw.random() < 0.3
    return bench, recorded, entry


def test_a_live_session_has_what_the_entry_says() -> None:
    for seed in range(200):
        bench, recorded, entry = drawn(seed)
        before = picture(recorded)
        live, _ = taken(recorded, bench.images)
        assert picture(recorded) == before, seed
        again = entry.replays or {}
        if recorded.rare.replays_over:
            again = {}
        assert [each.filter for each in live.subscriptions.values() if each.replay] == list(again)
        for row in entry.subscriptions:
            subscription = live.subscriptions[row[0]]
            assert subscription_row(subscription)[:5] == row[:5]
            if row[0] in again:
                assert subscription.start == again[row[0]].start
                assert picture(subscription.replay) == picture(
                    Replay(again[row[0]].seam, {b"a/b": 3}, {(1, 4)} - (live.done or set()))
                )
            elif row[0] not in (entry.replays or {}):
                is_passed = row[6] is None or all(map(ge, live.positions or (), row[6]))
                assert subscription.start == (None if is_passed else row[6])
        cursor = decode_cursor(entry.cursor)
        if cursor.positions:
            assert live.positions == live.logged_positions == [each for _, each in cursor.positions]
        else:
            assert live.logged_positions is None
        inflight = {packet_id: each for packet_id, each in cursor.inflight if each is not None}
        assert list(map(picture, live.inflight.values())) == [
            picture(each) for each in in_log_order(inflight).values()
        ]
        assert live.done == (set(cursor.done) or None)
        assert live.will is recorded.will
        assert (live.expiry_s, live.username, live.is_owned) == (
            entry.expiry_s,
            entry.username,
            entry.proved,
        )
        assert (live.epoch, live.life, live.owner) == (entry.epoch, entry.born, entry.owner)
        assert live.rare.maybe_sent == ([45, 46] if entry.maybe_sent else None)
        owed = {filter: (each.after, each.seam) for filter, each in (live.rare.owed or {}).items()}
        assert owed == (entry.owed or {})
        assert live.rare.owed_inflight == (set(entry.passed or ()) or None)
        live.check()


def test_a_session_begins_as_from_its_own_entry() -> None:
    """A snapshot and a transfer lose nothing that a live session has."""
    for seed in range(200):
        bench, recorded, _ = drawn(seed)
        other = Bench()
        same = other.images.restore(bench.images.entry(recorded))
        same.own_rare().replays_over = recorded.rare.replays_over
        live, routes = taken(recorded, bench.images)
        again, same_routes = taken(same, other.images)
        assert picture(live) == picture(again), seed
        assert routes == same_routes


def test_the_live_session_shares_nothing_that_changes() -> None:
    """Counter-example: a client acknowledges a message, and its packet id is freed in the
    replicated state before a record says so."""
    for seed in range(100):
        bench, recorded, _ = drawn(seed)
        before = picture(recorded)
        live, _ = taken(recorded, bench.images)
        for entry in live.inflight.values():
            entry.state = 2
        for packet_id in list(live.inflight):
            del live.inflight[packet_id]
        for each in live.subscriptions.values():
            if each.start is not None:
                each.start[:] = [0, 0]
            if each.replay is not None:
                each.replay.seam[:] = [0, 0]
                each.replay.floors.clear()
        for positions in (live.positions, live.logged_positions):
            if positions is not None:
                positions[:] = [0, 0]
        live.add_done([(1, 49)])
        if live.rare.owed_inflight:
            live.rare.owed_inflight.clear()
        for owed in (live.rare.owed or {}).values():
            owed.after = "z"
        assert picture(recorded) == before, seed
