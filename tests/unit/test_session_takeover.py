"""A session begins from the replicated state of its node as it does from another node's entry."""

import random

from holdfast.node.config import NodeConfig
from holdfast.node.session.additions import LOG_READER
from holdfast.node.session.rare_fields import rarities_of
from holdfast.node.session.session import Inflight, Session
from holdfast.node.session.state import encode_cursor
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import ReplayEntry, SessionEntry, WillEntry
from holdfast.node.state.session_takeover import SessionTakeover
from tests.support.journal_port import new_state
from tests.unit.test_cluster_images import Bench

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


def taken(recorded: Session, images: ReplicatedState, replays_over: bool, *, here: bool) -> object:
    """The live session and the routes of a node, after it took over the recorded one."""
    config = NodeConfig(node_id="n1", partitions=2)
    state = new_state(config, images.state.journal)
    state.delivered = [45, 46]
    takeover = SessionTakeover(state)
    if here:
        live = takeover.take_over_here(recorded)
    else:
        live = takeover.take_over(images.entry(recorded), replays_over)
    assert state.sessions == {"c": live}
    return picture(live), sorted(state.subscriptions.filters()), sorted(state.groups)


def test_a_session_begins_here_as_from_an_entry() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        bench = Bench()
        recorded = bench.images.restore(drawn_entry(draw))
        replays_over = draw.random() < 0.3
        # Timers and snapshots look at some sessions first.
        if draw.random() < 0.5:
            bench.images.entry(recorded)
        rarities_of(recorded).replays_over = replays_over
        before = picture(recorded)
        here = taken(recorded, bench.images, replays_over, here=True)
        assert picture(recorded) == before, seed
        assert here == taken(recorded, bench.images, replays_over, here=False), seed
