"""What a member knows: link state, interest, routes, duplicates, the state of its links."""

import random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.topics.names import matches
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.frames import FILTERS_MAX, Announcement
from holdfast_federation.core.identity import MessageId
from holdfast_federation.core.messages.duplicates import (
    EPOCH_KEPT_S,
    WINDOW,
    Duplicates,
    Freshness,
    Window,
)
from holdfast_federation.core.routing.interest import LocalInterest, RemoteInterest, generalised
from holdfast_federation.core.routing.link_health import LinkTable
from holdfast_federation.core.routing.link_state import (
    AnnouncementVerdict,
    LinkStateDatabase,
    announcements,
)
from holdfast_federation.core.routing.routes import Routes, Tree
from tests.support.sim_federation import LAN_EDGES, edges_of, node_id, random_edges

A, B = node_id(1), node_id(2)


def said(
    version: int, base: int = 0, added: list[str] | None = None, epoch: int = 1, **more: object
) -> Announcement:
    links: list[bytes] = more.pop("links", [])  # type: ignore[assignment]
    removed: list[str] = more.pop("removed", [])  # type: ignore[assignment]
    return Announcement(A, epoch, version, base, links, "", False, added or [], removed)


def test_the_newest_counts_in_whatever_order_it_comes() -> None:
    database = LinkStateDatabase()
    assert database.apply(said(3, added=["c"]), 0.0) is AnnouncementVerdict.NEWS
    assert database.apply(said(2, added=["b"]), 0.0) is AnnouncementVerdict.OLD
    assert database.apply(said(3, added=["c"]), 0.0) is AnnouncementVerdict.OLD
    assert database.apply(said(1, added=["d"], epoch=2), 0.0) is AnnouncementVerdict.NEWS
    assert database.apply(said(9, added=["e"]), 0.0) is AnnouncementVerdict.OLD
    assert database.entries[A].filters == {"d"}


def test_a_change_applies_to_exactly_its_base() -> None:
    database = LinkStateDatabase()
    assert database.apply(said(2, 1, ["x"]), 0.0) is AnnouncementVerdict.GAP
    database.apply(said(1, added=["a", "b"]), 0.0)
    assert database.apply(said(3, 2, ["c"]), 0.0) is AnnouncementVerdict.GAP
    assert database.apply(said(2, 1, ["c"], removed=["a"]), 0.0) is AnnouncementVerdict.NEWS
    assert database.entries[A].filters == {"b", "c"}


def test_many_filters_come_in_chunks_in_any_order() -> None:
    first, second = LinkStateDatabase(), LinkStateDatabase()
    first.apply(said(1), 0.0)
    filters = [f"t/{number}" for number in range(3 * FILTERS_MAX - 1)]
    for version, at in enumerate(range(0, len(filters), FILTERS_MAX), 2):
        first.apply(said(version, version - 1, filters[at : at + FILTERS_MAX]), 0.0)
    chunks = announcements(first.entries[A])
    assert len(chunks) == 3
    random.Random(1).shuffle(chunks)
    verdicts = [second.apply(chunk, 0.0) for chunk in chunks]
    assert verdicts == [
        AnnouncementVerdict.PART,
        AnnouncementVerdict.PART,
        AnnouncementVerdict.NEWS,
    ]
    assert second.entries[A].filters == set(filters)
    assert second.digest == first.digest


def test_what_is_not_repeated_expires() -> None:
    database = LinkStateDatabase()
    before = database.digest
    database.apply(said(1, added=["a"], links=[B]), 0.0)
    assert database.digest != before
    assert database.expire(99.0, B, 100.0) == []
    assert database.expire(100.0, A, 100.0) == []
    assert database.expire(100.0, B, 100.0) == [A]
    assert database.digest == before


def test_a_link_needs_both_ends() -> None:
    database = LinkStateDatabase()
    database.apply(said(1, links=[B]), 0.0)
    assert database.graph() == {A: []}
    database.apply(Announcement(B, 1, 1, 0, [A], "", False, [], []), 0.0)
    assert database.graph() == {A: [B], B: [A]}
    assert Routes(A, database).next_hop(B) == B


def test_filters_are_counted() -> None:
    interest = LocalInterest()
    assert interest.change(["a/+", "a/+"], [])
    assert not interest.change([], ["a/+"])
    assert interest.matches("a/b")
    assert interest.change([], ["a/+"])
    assert not interest.matches("a/b")
    assert interest.announced() == set()


def test_members_are_found_by_wildcards_and_forgotten() -> None:
    remote = RemoteInterest()
    remote.change(A, ["a/+"], [])
    remote.change(B, ["#", "a/b"], [])
    assert remote.members("a/b") == (A, B)
    assert remote.members("$x") == ()
    remote.change(B, [], ["#", "a/b"])
    assert remote.members("a/b") == (A,)


LEVELS = st.lists(st.sampled_from(["a", "b", "c", "+"]), min_size=1, max_size=4)
FILTERS = st.sets(LEVELS.map("/".join), min_size=1, max_size=12)


@given(FILTERS, st.integers(1, 6), LEVELS.map("/".join))
def test_fewer_filters_match_no_less(filters: set[str], limit: int, filter: str) -> None:
    topic = filter.replace("+", "a")
    fewer = generalised(filters, limit)
    assert len(fewer) <= limit
    if any(matches(one, topic) for one in filters):
        assert any(matches(one, topic) for one in fewer)


def graph_of(edges: list[tuple[int, int]]) -> dict[bytes, list[bytes]]:
    graph: dict[bytes, list[bytes]] = {}
    for a, b in edges:
        graph.setdefault(node_id(a), []).append(node_id(b))
        graph.setdefault(node_id(b), []).append(node_id(a))
    return {node: sorted(peers) for node, peers in graph.items()}


def test_the_members_agree_on_every_tree() -> None:
    """Each takes its own next hop; together they walk the tree of the origin."""
    for seed in range(20):
        graph = graph_of(random_edges(14, random.Random(seed)))
        hops = {node: Tree(node, graph).first_hops() for node in graph}
        for root in graph:
            tree = Tree(root, graph)
            for node, parent in tree.parents.items():
                assert hops[parent][node] == node
                at, steps = root, 0
                while at != node:
                    at, steps = hops[at][node], steps + 1
                    assert tree.depths[at] == steps
                    assert at == node or at in tree.pruned({node}).values()


def test_the_published_graph_needs_three_copies() -> None:
    tree = Tree(node_id(11), graph_of(edges_of(LAN_EDGES)))
    assert tree.depths[node_id(0)] == 1
    assert tree.depths[node_id(5)] == 3
    assert len(tree.pruned({node_id(0), node_id(5)})) == 3


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=60))
def test_the_window_is_a_set_that_refuses_what_it_cannot_know(sequences: list[int]) -> None:
    window = Window()
    seen: set[int] = set()
    for sequence in sequences:
        newest = max(seen, default=0)
        if sequence in seen or sequence <= newest - WINDOW:
            expected = Freshness.SEEN
        else:
            expected = Freshness.NEW if sequence > newest else Freshness.LATE
        assert window.add(sequence) is expected
        seen.add(sequence)


def test_windows_are_forgotten_after_ten_minutes() -> None:
    duplicates = Duplicates()
    assert duplicates.add(MessageId(A, 1, 5), 0.0) is Freshness.NEW
    assert duplicates.add(MessageId(A, 2, 5), 1.0) is Freshness.NEW
    assert duplicates.add(MessageId(A, 1, 5), 2.0) is Freshness.SEEN
    duplicates.expire(1.0 + EPOCH_KEPT_S)
    assert len(duplicates) == 1


def test_a_link_that_flaps_waits_longer_and_longer_up_to_a_bound() -> None:
    links = LinkTable(FederationConfig())
    waits = []
    for round in range(12):
        now = float(round)
        links.up(A, now)
        waits.append(links[A].usable_at - now)
        links.down(A, now)
    assert waits == [0.0, 0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    links.up(A, 100.0)
    assert links.usable(100.0) == [A]
