"""A member that is not on the path says what it has no say in: every kind of frame, forged in every
field. All that the others have stays as it is, but counters. And what the class does not cover."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast_federation.core.config import FederationConfig
from holdfast_federation.core.effects import (
    Delete,
    DeliverLocally,
    Dropped,
    Effect,
    IdentityConflict,
    Message,
    Send,
    Store,
)
from holdfast_federation.core.frames import (
    KINDS,
    Announcement,
    AnnouncementRequest,
    Announcements,
    Clock,
    Data,
    Frame,
    Goodbye,
    Hello,
    Memory,
    Retained,
    RetainedDigest,
    RetainedMessage,
    RetainedRequest,
    Skip,
    StreamAck,
    Voucher,
    Vouchers,
    decode,
    encode,
)
from holdfast_federation.core.identity import EPOCH_MAX, EPOCH_STEP_MAX, Identity
from holdfast_federation.core.member import FederationMember
from holdfast_federation.core.messages import streams as receiving
from holdfast_federation.core.routing import link_state
from tests.support.fed_signing import TestSigning, voucher
from tests.support.sim_federation_member import node_id

A, B, C, D, E, F = (node_id(number) for number in range(1, 7))
"""A is looked at. A, B and C are linked with each other, C forges. D is behind B, E behind A. F is
nobody."""
LINKS = {B: [A, C, D], C: [A, B], D: [B], E: [A]}
NUMBERS = [1, 2, 3, 4, 5, 2**24, 2**40, 2**60, EPOCH_MAX]
NODES = [A, B, D, E, F]


def announcement(node: bytes, version: int = 1, **changes: Any) -> Announcement:
    news = Announcement(node, 1, version, 0, LINKS[node], f"at:{node[-1]}", False, ["t/#"], [])
    return replace(news, **changes)


def said(member: FederationMember, peer: bytes, news: Announcement, now: float) -> None:
    """With its signature."""
    member.frame(peer, encode(Vouchers([voucher(news, set(news.added))])), now)
    member.frame(peer, encode(Announcements([news])), now)


def data(origin: bytes, place: int, destinations: list[bytes], qos: int = 1) -> Data:
    places = [(node, place if qos else 0, min(place, 1) if qos else 0) for node in destinations]
    return Data(origin, 1, place, 1, 8, qos, False, "in/x", b"true", b"", None, places)


def member_a(signing: bool = True, **options: Any) -> FederationMember:
    """With messages on their way to B and D, and some from them."""
    config = FederationConfig(**options)
    member = FederationMember(
        *(Identity(A, 1), "at:1", config, 0.0, ["in/#"]),
        wall_s=1_750_000_000.0,
        signing=TestSigning(A) if signing else None,
    )
    for peer in (B, C, E):
        member.link_up(peer, 0.0)
    member.handle_timers(0.02)
    for node in (B, C, E):
        said(member, node, announcement(node), 0.03)
    said(member, B, announcement(D), 0.03)
    for number in range(3):
        message = Message("t/1", b"%d" % number, 1, is_repeatable=True)
        assert member.local_publish(message, 0.1)
    for place in range(1, 4):
        member.frame(B, encode(data(B, place, [A])), 0.1)
        member.frame(B, encode(data(D, place, [A])), 0.1)
        member.frame(B, encode(data(D, place, [A], 0)), 0.1)
    retained = Message("t/kept", b"kept", 1, True)
    assert member.local_publish(retained, 0.1)
    for effect in member.take_effects():
        if isinstance(effect, Store | DeliverLocally) and effect.id.sequence:
            member.stored(effect.id, 0.1)
    member.handle_timers(0.15)
    member.take_effects()
    assert member.custody.queued(B) == 4
    assert member.custody.queued(D) == 4
    return member


def state_of(member: FederationMember) -> tuple[object, ...]:
    """All but counters, and what a link of its own shows."""
    entries = member.database.entries.values()
    arriving = member._arriving
    windows = [arriving._relayed._windows, arriving._received._windows]
    store = member.retained.store
    return (
        sorted((each.key, each.links, each.address, sorted(each.filters)) for each in entries),
        {node: member.custody.queued(node) for node in NODES},
        {node: stream.launched for node, stream in member.custody._streams.items()},
        {node: (each.epoch, each.next_place) for node, each in member.receiving._sources.items()},
        [{key: (each.newest, bytes(each._bits)) for key, each in one.items()} for one in windows],
        [(message.topic, message.version) for message in store.matching("#", "")],
        member.retained.clock.wall_us(0.2),
        member.database.forgotten,
        member._departures.due,
        member.routes.reached(),
    )


RETAINED = RetainedMessage("t/kept", b"forged", 1, b"", None, (2**50, F, 1, 1))
FORGED: dict[type[Frame], tuple[Frame, dict[str, list[Any]]]] = {
    Hello: (
        Hello(1, bytes(8), False),
        {"epoch": NUMBERS, "digest": [b"x" * 8], "wants_reply": [True, False]},
    ),
    AnnouncementRequest: (
        AnnouncementRequest([(B, 2, 1)]),
        {"known": [[(node, number, 1)] for node in NODES for number in NUMBERS]},
    ),
    Data: (
        data(D, 4, [A]),
        {
            "node": NODES,
            "epoch": NUMBERS,
            "sequence": NUMBERS,
            "hops": [0, 7],
            "hops_max": [1, 16],
            "qos": [],  # below
            "is_retained": [True],
            "topic": ["in/kept", "other"],
            "payload": [b""],
            "properties": [b"x"],
            "expiry_s": [0.0],
            "destinations": [
                *(
                    [(A, place, base)]
                    for place in NUMBERS
                    for base in (1, 3, place)
                    if base <= place
                ),
                [(B, 4, 1)],
                [(E, 4, 1)],
                [(A, 4, 1), (E, 4, 1), (B, 9, 9)],
            ],
            "path": [0, 1, 2],
            "stamp": NUMBERS,
            "grants": [[(A, False, [])], [(A, True, ["$share/g/in/#"])]],
            "is_regranted": [True],
        },
    ),
    Skip: (
        Skip(D, 1, 4, 1, 8, [(A, 4, 1)]),
        {
            "node": NODES,
            "epoch": NUMBERS,
            "sequence": NUMBERS,
            "hops": [0, 7],
            "hops_max": [1, 16],
            "destinations": [[(A, 2**40, 2**40)], [(E, 4, 1)]],
            "path": [0, 1, 2],
        },
    ),
    StreamAck: (
        StreamAck(A, 1, B, 4, 0),
        {
            "origin": [*NODES, C],
            "epoch": NUMBERS,
            "destination": NODES,
            "place": NUMBERS,
            "hops": [0, 16],
        },
    ),
    RetainedRequest: (
        RetainedRequest(D, A, 0, 1, "#", None, "", None, []),
        {
            "source": NODES,
            "destination": [*NODES, C],
            "hops": [0, 15],
            "number": NUMBERS,
            "filter": ["t/#"],
            "bucket": [None, 1],
            "after": ["t"],
            "end_topic": ["t/z"],
            "known": [[("t/kept", (2**50, F, 1, 1))]],
        },
    ),
    Retained: (
        Retained(D, A, 0, 0, [RETAINED], None),
        {
            "source": NODES,
            "destination": NODES,
            "hops": [0, 15],
            "number": NUMBERS,
            "messages": [[replace(RETAINED, payload=b"")], [replace(RETAINED, topic="in/new")]],
            "end_topic": ["t/z"],
        },
    ),
    RetainedDigest: (
        RetainedDigest(D, A, 0, [(1, 5)]),
        {
            "source": NODES,
            "destination": NODES,
            "hops": [0, 15],
            "buckets": [[], [(bucket, 7) for bucket in range(64)]],
        },
    ),
    Announcements: (
        Announcements([announcement(D, 2)]),
        {
            "entries": [
                [replace(announcement(D, 2), **{field: value})]
                for field, values in {
                    "origin": NODES,
                    "epoch": NUMBERS,
                    "version": NUMBERS,
                    "links": [[], [C], [A], [B, C, E]],
                    "address": ["evil:1"],
                    "is_leaving": [True],
                    "added": [[], ["#"]],
                    "chunk": [0],
                    "chunks": [2],
                }.items()
                for value in values
            ]
            + [[announcement(D, 2, base=1, added=["#"], removed=["t/#"])]]
        },
    ),
    Vouchers: (
        Vouchers([Voucher(D, 1, 2, 0.0, D, b"signature")]),
        {
            "entries": [
                [Voucher(node, epoch, version, age_s, certificate, b"x" * 32)]
                for node in NODES
                for epoch in (1, 2**40)
                for version in (1, 2)
                for age_s in (0.0, 1e9)
                for certificate in (b"", node, C)
            ]
        },
    ),
    Clock: (
        Clock(0.0),
        {"wall_s": [-1e12, 1.75e9, 4e9, 1e12]},
    ),
    Memory: (
        Memory(1.0, [(B, 1, 1)]),
        {"wall_s": [0.0, 4e9], "forgotten": [[(node, EPOCH_MAX, 1)] for node in NODES]},
    ),
}
"""Of each kind a frame of C that claims to be another's, and what each field of it may be. A field
that is missing here has nobody who says when it is believed."""
OWN_LINK = {Goodbye: "closes the link of who says it"}


def forgeries(kind: type[Frame]) -> Iterator[Frame]:
    frame, fields = FORGED[kind]
    yield frame
    for field, values in fields.items():
        for value in values:
            yield replace(frame, **{field: value})
    if kind is Data:
        for origin in (B, D, F, E):
            for sequence in NUMBERS:
                yield replace(data(origin, 1, [A], 0), sequence=sequence)
                yield replace(data(origin, 1, [E], 0), sequence=sequence)


def is_harmless(effect: object) -> bool:
    """A reply over the link to C, or a word about it."""
    return isinstance(effect, Send) and effect.peer == C


def test_every_field_of_every_frame_is_forged() -> None:
    for kind in KINDS.values():
        if kind not in OWN_LINK:
            assert set(FORGED[kind][1]) == set(kind.__struct_fields__), kind


@pytest.mark.parametrize("kind", FORGED, ids=lambda kind: kind.__name__)
def test_a_member_that_is_not_on_the_path_changes_nothing(kind: type[Frame]) -> None:
    member = member_a()
    before = state_of(member)
    for frame in forgeries(kind):
        if C not in member.links:
            member.link_up(C, 0.2)
            member.take_effects()
        member.frame(C, encode(frame), 0.2)
        effects = member.take_effects()
        for effect in effects:
            closes_link = type(effect).__name__ == "CloseLink"
            assert is_harmless(effect) or closes_link, (frame, effect)
        if C in member.links:
            assert state_of(member) == before, frame
    member.handle_timers(0.21)
    assert not [each for each in member.take_effects() if isinstance(each, Dropped | Delete)]


def test_the_same_frames_count_where_they_are_true() -> None:
    """Otherwise the test above would pass with a member that believes nothing."""
    member = member_a()
    member.frame(B, encode(data(D, 4, [A])), 0.2)
    assert [each.place for each in member.take_effects() if isinstance(each, DeliverLocally)] == [4]
    member.frame(B, encode(StreamAck(A, 1, D, 3, 0)), 0.2)
    assert member.custody.queued(D) == 1
    said(member, B, announcement(D, 2, added=["new"]), 0.2)
    assert member.database.entries[D].filters == {"new"}
    member.frame(B, encode(data(D, 1, [E])), 0.2)
    assert E in [each.peer for each in member.take_effects() if isinstance(each, Send)]


# What a member on the path may say


def test_what_was_not_sent_is_not_confirmed() -> None:
    member = member_a(window_messages=2, shared_window_messages=2)
    sent = member.custody._streams[B].launched[1]
    assert sent == 2
    member.frame(B, encode(StreamAck(A, 1, B, 2**40, 0)), 0.2)
    assert member.custody.queued(B) == 2


def test_a_confirmation_of_an_earlier_life_counts_when_it_is_sent_again() -> None:
    first = member_a()
    stored = [each for entry in first.custody._entries.values() for each in [entry]]
    data_of = {entry.id: entry for entry in stored}
    assert len(data_of) == 4
    frames = [
        encode(replace(data(A, 1, [B]), sequence=place, destinations=[(B, place, place)]))
        for place in (1, 2, 3)
    ]
    again = FederationMember(
        Identity(A, 2), "", FederationConfig(window_messages=2), 0.0, ["in/#"], stored=frames
    )
    again.link_up(B, 0.0)
    again.handle_timers(0.02)
    news = announcement(B, links=[A])
    again.frame(B, encode(Announcements([news])), 0.03)
    assert again.custody._streams[B].launched == (1, 2)
    again.frame(B, encode(StreamAck(A, 1, B, 3, 0)), 0.04)
    assert again.custody.queued(B) == 1
    again.frame(B, encode(StreamAck(A, 1, B, 3, 0)), 0.05)
    assert again.custody.queued(B) == 0


# Announcements without signatures


def test_of_a_linked_member_only_its_own_word_counts() -> None:
    member = member_a(signing=False)
    forged = announcement(B, 9, is_leaving=True, links=[])
    member.frame(C, encode(Announcements([forged])), 0.2)
    assert member.database.entries[B].version == 1
    assert member.custody.queued(B) == 4
    assert member.counts["announcement by another"] == 1
    member.link_down(B, 0.3)
    member.frame(C, encode(Announcements([announcement(B, 10, links=[C, D])])), 0.3)
    assert member.database.entries[B].version == 10


@pytest.mark.parametrize("epoch", [2**62, EPOCH_MAX, 2**49, 2 + EPOCH_STEP_MAX])
def test_an_epoch_that_nobody_has_counted_is_not_believed(epoch: int) -> None:
    member = member_a(signing=False)
    member.frame(C, encode(Announcements([announcement(D, epoch=epoch)])), 0.2)
    assert member.database.entries[D].epoch == 1
    assert member.counts["absurd announcement"] == 1
    # Of ourselves, neither: what is stored of it would be above all later starts.
    own = Announcement(A, epoch, 1, 0, [], "", True, [], [])
    member.frame(C, encode(Announcements([own])), 0.2)
    assert not [each for each in member.take_effects() if isinstance(each, IdentityConflict)]


def later_start(epoch: int = 7) -> bytes:
    return encode(Announcements([Announcement(A, epoch, 1, 0, [], "", False, [], [])]))


def conflicts(member: FederationMember) -> list[Effect]:
    return [each for each in member.take_effects() if isinstance(each, IdentityConflict)]


def test_one_of_several_peers_ends_no_young_life() -> None:
    """By a made-up later start it could end it again and again."""
    member = member_a(signing=False)
    member.frame(C, later_start(), 0.2)
    assert conflicts(member) == []
    assert member.counts["later start"] == 1
    claim_s = FederationConfig().claim_s
    assert member.timer(0.2) <= claim_s
    member.handle_timers(claim_s - 0.1)
    assert conflicts(member) == []
    # By then others may believe it, and must hear that it is not so.
    member.handle_timers(claim_s)
    assert conflicts(member) == [IdentityConflict(7)]


def test_most_peers_are_believed_of_a_later_start_at_once() -> None:
    member = member_a(signing=False)
    for peer in list(member.links.peers())[:-1]:
        member.frame(peer, later_start(), 0.2)
    assert conflicts(member) == [IdentityConflict(7)]


def test_the_claim_of_a_peer_goes_with_its_link() -> None:
    member = member_a(signing=False)
    member.frame(C, later_start(), 0.2)
    member.link_down(C, 0.3)
    member.handle_timers(FederationConfig().claim_s)
    assert conflicts(member) == []


def test_of_a_member_behind_others_it_is_believed_later_that_it_has_left() -> None:
    member = member_a(signing=False)
    member.frame(B, encode(Announcements([announcement(D, 2, is_leaving=True, links=[])])), 0.2)
    assert member.custody.queued(D) == 4
    # It has heard that, and denies it.
    member.frame(B, encode(Announcements([announcement(D, epoch=2)])), 10.0)
    member.handle_timers(90.0)
    assert member.custody.queued(D) == 4
    member.frame(B, encode(Announcements([announcement(D, 2, epoch=2, is_leaving=True)])), 90.0)
    member.handle_timers(149.0)
    assert member.custody.queued(D) == 4
    member.handle_timers(151.0)
    assert member.custody.queued(D) == 0


def test_a_member_that_is_away_cannot_leave() -> None:
    member = member_a(signing=False)
    member.frame(B, encode(Announcements([announcement(B, 2, links=[A, C])])), 0.2)
    member.handle_timers(100.0)
    member.link_up(C, 100.0)
    member.frame(C, encode(Announcements([announcement(D, 2, is_leaving=True)])), 100.0)
    member.handle_timers(1000.0)
    assert member.custody.queued(D) == 4


def test_a_member_leaves_by_its_own_word_or_signature_at_once() -> None:
    unsigned, signed = member_a(signing=False), member_a()
    unsigned.frame(B, encode(Announcements([announcement(B, 2, is_leaving=True, links=[])])), 0.2)
    assert unsigned.custody.queued(B) == 0
    said(signed, C, announcement(D, 2, is_leaving=True, links=[]), 0.2)
    assert signed.custody.queued(D) == 0


# Signatures


def test_a_signature_survives_changes_chunks_and_members_on_the_way() -> None:
    """D announces 1,200 filters, then one more; B passes them on; A asks for the whole later."""
    one = FederationMember(
        *(Identity(D, 1), "", FederationConfig(), 0.0, [f"f/{number}" for number in range(1200)]),
        signing=TestSigning(D),
    )
    two = FederationMember(Identity(B, 1), "", FederationConfig(), 0.0, signing=TestSigning(B))
    three = FederationMember(Identity(A, 1), "", FederationConfig(), 0.0, signing=TestSigning(A))
    members = {D: one, B: two, A: three}
    now = 0.0
    pairs = [(D, B), (B, D)]
    for node, peer in pairs:
        members[node].link_up(peer, now)

    def run(seconds: float) -> None:
        nonlocal now
        end = now + seconds
        while now < end:
            now += 0.01
            for node, member in members.items():
                if member.timer(now) <= now:
                    member.handle_timers(now)
                for effect in member.take_effects():
                    if isinstance(effect, Send) and (node, effect.peer) in pairs:
                        members[effect.peer].frame(node, effect.data, now)

    run(1.0)
    one.local_interest(["more"], [], now)
    run(3.0)
    assert len(two.database.entries[D].filters) == 1201
    pairs += [(B, A), (A, B)]
    two.link_up(A, now)
    three.link_up(B, now)
    run(3.0)
    assert three.database.entries[D].filters == two.database.entries[D].filters
    assert three.database.entries[D].voucher is not None
    assert three.database.digest == two.database.digest
    # And from what it remembers.
    again = FederationMember(
        *(Identity(A, 2), "", FederationConfig(), now, ()),
        remembered=three.memory(now, 1e9),
        signing=TestSigning(A),
    )
    remembered = again.database.entries[D].voucher
    assert remembered is not None
    assert remembered.signature == three.database.entries[D].voucher.signature
    assert "forged announcement" not in two.counts + three.counts


def test_unsigned_and_signed_members_go_together_where_nobody_insists() -> None:
    member = FederationMember(
        *(Identity(A, 1), "", FederationConfig(), 0.0), signing=TestSigning(A, is_required=False)
    )
    member.link_up(B, 0.0)
    member.frame(B, encode(Announcements([announcement(B), announcement(D)])), 0.1)
    assert member.database.entries.keys() == {A, B, D}
    forged = announcement(D, 2)
    member.frame(B, encode(Vouchers([voucher(forged, {"t/#"}, signer=C)])), 0.2)
    member.frame(B, encode(Announcements([forged])), 0.2)
    assert member.database.entries[D].version == 1
    assert member.counts["forged announcement"] == 1


def test_members_of_the_version_before_take_what_is_said_beside_announcements() -> None:
    """They pass over kinds that they do not know, and get nothing in those that they know."""
    assert len(Announcement.__struct_fields__) == 11
    frames = [decode(effect.data) for effect in linked_frames()]
    assert [type(frame) for frame in frames].count(Announcements) > 0
    assert all(isinstance(frame, Frame) for frame in frames)  # type: ignore[arg-type]


def linked_frames() -> list[Send]:
    member = FederationMember(
        Identity(A, 1), "", FederationConfig(), 0.0, ["x"], signing=TestSigning(A)
    )
    member.link_up(B, 0.0)
    member.handle_timers(0.02)
    return [each for each in member.take_effects() if isinstance(each, Send)]


# Room


def test_the_member_with_the_most_filters_is_cut_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_state, "FILTERS_KEPT_MAX", 1_000)
    database = link_state.LinkStateDatabase(A)

    def says(node: bytes, version: int, added: list[str]) -> link_state.AnnouncementVerdict:
        news = Announcement(node, 1, version, version - 1, [], "", False, added, [])
        return database.apply(news, 0.0, source=node)

    for version in range(1, 4):
        added = [f"c/{version}/{number}" for number in range(400)]
        assert says(C, version, [*added, "$share/g/c"]) is link_state.AnnouncementVerdict.NEWS
    for number in range(5):
        assert says(node_id(10 + number), 1, [f"b/{at}" for at in range(100)]) is (
            link_state.AnnouncementVerdict.NEWS
        )
    # It gets everything, and its groups theirs; nothing is lost for it.
    assert database.entries[C].filters == {"#", "$share/g/c"}
    assert all(len(database.entries[node_id(10 + number)].filters) == 100 for number in range(5))
    assert says(C, 4, ["more"]) is link_state.AnnouncementVerdict.NEWS
    assert sum(len(each.filters) for each in database.entries.values()) <= 1_000
    # It has fewer again.
    whole = Announcement(C, 1, 5, 0, [], "", False, ["few"], [])
    assert database.apply(whole, 0.0, source=C) is link_state.AnnouncementVerdict.NEWS
    assert database.entries[C].filters == {"few"}


def test_made_up_members_take_no_honest_members_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_state, "MEMBERS_MAX", 50)
    database = link_state.LinkStateDatabase(A)

    def says(node: bytes, source: bytes) -> link_state.AnnouncementVerdict:
        news = Announcement(node, 1, 1, 0, [], "", False, [], [])
        return database.apply(news, 0.0, source=source)

    for number in range(100):
        says(node_id(1000 + number), C)
    assert len(database.entries) == 50
    for number in range(20):
        assert says(node_id(100 + number), B) is link_state.AnnouncementVerdict.NEWS
    assert says(node_id(5000), C) is link_state.AnnouncementVerdict.FULL
    assert len(database.entries) == 50
    assert len(database.take_displaced()) == 20


def test_an_origin_that_starts_often_takes_no_window_of_others() -> None:
    member = member_a()
    windows = member._arriving._received._windows
    for epoch in range(1, 40):
        said(member, C, announcement(C, epoch=epoch, version=2), 0.2)
        member.frame(C, encode(replace(data(C, 1, [A], 0), epoch=epoch)), 0.2)
    assert [key for key in windows if key[0] == C] == [(C, 39)]
    assert (D, 1) in windows


def test_a_poisoned_place_of_an_earlier_version_is_forgotten() -> None:
    """It had stored the epoch that somebody made up for the origin."""
    member = FederationMember(
        *(Identity(A, 1), "", FederationConfig(), 0.0, ["in/#"]),
        positions={B: (2**62, 5), D: (1, 5)},
    )
    assert member.receiving.positions() == {D: (1, 5)}


def test_origins_that_are_no_members_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MEMBERS_MAX", 3)
    member = FederationMember(
        *(Identity(A, 1), "", FederationConfig(), 0.0, ["in/#"]),
        positions={node_id(number): (1, 5) for number in range(100, 103)},
    )
    member.link_up(B, 0.0)
    member.handle_timers(0.02)
    member.frame(B, encode(Announcements([announcement(B)])), 0.03)
    member.frame(B, encode(data(B, 1, [A])), 0.1)
    assert list(member.receiving.positions()) == [B]
