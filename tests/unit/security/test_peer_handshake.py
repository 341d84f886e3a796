"""The handshake of nodes, in memory: what it agrees on, and that nothing else gets through."""

import json
from collections.abc import Callable

import pytest
from msgspec.structs import asdict, replace

from holdfast.security.peer_handshake import BODY_BYTES_MAX, MAGIC, Handshake
from holdfast.security.peer_identity import PeerIdentity, Refusal

SECRET = b"a secret of the nodes, 32 or more"
N1 = PeerIdentity("n1", "inc1", "cluster-of-ours", process="p1", client_address="c:1883")
N2 = PeerIdentity("n2", "inc2", role="witness", process="p2", peer_address="[::1]:21883")
Judge = Callable[[PeerIdentity, bool], Refusal | None]


def nobody_minds(peer: PeerIdentity, last: bool) -> Refusal | None:
    return None


def side(
    dials: bool,
    identity: PeerIdentity,
    secret: bytes = SECRET,
    nonce: bytes = b"",
    judge: Judge = nobody_minds,
) -> Handshake:
    return Handshake(dials, identity, secret, nonce or (b"d" if dials else b"a") * 32, judge)


def talk(dialler: Handshake, acceptor: Handshake, piece: int = 1 << 20) -> list[bytes]:
    """Carry bytes to and fro until nobody has any; what went over the wire, in turn."""
    said: list[bytes] = []
    turn, other = dialler, acceptor
    while out := turn.take_out():
        said.append(out)
        for at in range(0, len(out), piece):
            other.receive(out[at : at + piece])
        turn, other = other, turn
    return said


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(("first", "second"), [(N1, N2), (N2, N1)])
@pytest.mark.parametrize("secret", [SECRET, b""])
def test_both_learn_who_the_other_is(
    first: PeerIdentity, second: PeerIdentity, secret: bytes, piece: int
) -> None:
    dialler, acceptor = side(True, first, secret), side(False, second, secret)
    talk(dialler, acceptor, piece)
    assert dialler.established
    assert acceptor.established
    assert (dialler.peer, acceptor.peer) == (second, first)


@pytest.mark.parametrize(("first", "second"), [(N1, N2), (N2, N1)])
def test_the_smaller_id_decides_and_decides_last(first: PeerIdentity, second: PeerIdentity) -> None:
    asked: list[tuple[str, str, bool]] = []

    def judge(name: str) -> Judge:
        def note(peer: PeerIdentity, last: bool) -> None:
            asked.append((name, peer.node_id, last))

        return note

    dialler = side(True, first, judge=judge(first.node_id))
    acceptor = side(False, second, judge=judge(second.node_id))
    talk(dialler, acceptor)
    assert asked.count(("n1", "n2", True)) == 1
    assert ("n2", "n1", True) not in asked
    assert asked[-1] == ("n1", "n2", True)


def test_what_follows_the_last_message_is_kept() -> None:
    dialler, acceptor = side(True, N2), side(False, N1)
    for _ in range(2):
        acceptor.receive(dialler.take_out())
        dialler.receive(acceptor.take_out())
    acceptor.receive(dialler.take_out())
    assert acceptor.established
    assert acceptor.rest == b""
    assert dialler.receive(acceptor.take_out() + b"frames")
    assert dialler.rest == b"frames"


def messages(first: PeerIdentity, second: PeerIdentity) -> list[bytes]:
    return talk(side(True, first), side(False, second))


@pytest.mark.parametrize(("first", "second"), [(N1, N2), (N2, N1)])
def test_any_changed_byte_is_noticed(first: PeerIdentity, second: PeerIdentity) -> None:
    """By the one who gets it or, for a nonce, by the one who gets the next message."""
    for number, message in enumerate(messages(first, second)):
        for at in range(len(message)):
            dialler, acceptor = side(True, first), side(False, second)
            ends = [dialler, acceptor]
            refused = False
            for turn in range(6):
                out = ends[turn % 2].take_out()
                if turn == number:
                    out = out[:at] + bytes((out[at] ^ 1,)) + out[at + 1 :]
                try:
                    ends[(turn + 1) % 2].receive(out)
                except Refusal:
                    refused = True
                    break
            stuck = not (dialler.established and acceptor.established)
            # A length that was made larger waits for more, until the time is up.
            assert refused or stuck, f"byte {at} of message {number}"
            assert stuck


def test_a_recorded_handshake_cannot_be_played_again() -> None:
    recorded = talk(side(True, N1), side(False, N2))
    acceptor = side(False, N2, nonce=b"b" * 32)
    acceptor.receive(recorded[0])
    acceptor.take_out()
    with pytest.raises(Refusal, match="secret"):
        acceptor.receive(recorded[2])
    assert acceptor.take_out() == b""
    dialler = side(True, N1, nonce=b"e" * 32)
    dialler.take_out()
    dialler.receive(recorded[1])
    dialler.take_out()
    with pytest.raises(Refusal, match="secret"):
        dialler.receive(recorded[3])


def test_what_a_node_says_cannot_be_sent_back_to_it() -> None:
    dialler = side(True, N1)
    preamble = dialler.take_out()
    dialler.receive(preamble)
    proof = dialler.take_out()
    with pytest.raises(Refusal):
        dialler.receive(proof)
    acceptor, other = side(False, N2), side(False, N1)
    acceptor.receive(preamble)
    other.receive(acceptor.take_out())
    # An acceptor proves nothing before the dialler has: there is nothing to relay.
    assert not other.take_out().removeprefix(MAGIC + b"\0\1" + b"a" * 32)


def test_one_proof_does_not_serve_on_another_connection() -> None:
    """Who stands between two nodes and mixes two connections of theirs gets nowhere."""
    dialler, acceptor = side(True, N1), side(False, N2)
    other_dialler, other_acceptor = side(True, N1, nonce=b"x" * 32), side(False, N2)
    acceptor.receive(dialler.take_out())
    other_acceptor.receive(other_dialler.take_out())
    dialler.receive(acceptor.take_out())
    other_dialler.receive(other_acceptor.take_out())
    with pytest.raises(Refusal, match="secret"):
        acceptor.receive(other_dialler.take_out())


@pytest.mark.parametrize(
    ("first", "second"), [(SECRET, b"another secret, long enough again"), (SECRET, b"")]
)
def test_without_the_secret_nobody_learns_anything(first: bytes, second: bytes) -> None:
    dialler, acceptor = side(True, N1, first), side(False, N2, second)
    acceptor.receive(dialler.take_out())
    dialler.receive(acceptor.take_out())
    proof = dialler.take_out()
    with pytest.raises(Refusal) as caught:
        acceptor.receive(proof)
    assert caught.value.reason == "secret"
    assert acceptor.take_out() == b""
    assert not acceptor.authenticated
    assert acceptor.peer is None
    # The dialler has shown no word about itself, and says what may be wrong.
    assert b"n1" not in proof
    assert dialler.cut_short().reason == "secret_there"
    assert "cluster.secret_file" in str(dialler.cut_short())


def test_an_acceptor_without_the_secret_cannot_answer() -> None:
    dialler, acceptor = side(True, N1, SECRET), side(False, N2, SECRET)
    stranger = side(False, N2, b"another secret, long enough again")
    preamble = dialler.take_out()
    stranger.receive(preamble)
    dialler.receive(stranger.take_out())
    dialler.take_out()
    acceptor.receive(preamble)
    # The stranger goes on as if the proof had been right.
    stranger._handle(1, b"")
    with pytest.raises(Refusal, match="secret"):
        dialler.receive(stranger.take_out())
    assert dialler.take_out() == b""
    assert dialler.peer is None


def test_an_acceptor_is_silent_until_it_has_seen_the_magic() -> None:
    acceptor = side(False, N2)
    for byte in MAGIC + b"\0":
        assert not acceptor.receive(bytes((byte,)))
        assert acceptor.take_out() == b""


@pytest.mark.parametrize("dials", [True, False])
@pytest.mark.parametrize("length", range(9))
def test_other_protocols_are_refused_at_the_first_wrong_byte(dials: bool, length: int) -> None:
    one = side(dials, N1)
    one.take_out()
    with pytest.raises(Refusal) as caught:
        one.receive(MAGIC[:length] + b"\x00\xff\xff")
    assert caught.value.reason == ("magic" if length < 8 else "version")
    with pytest.raises(Refusal, match=r"speaks TLS.*cluster\.certificate"):
        side(dials, N1).receive(b"\x16\x03\x01\x02\x00")


@pytest.mark.parametrize("dials", [True, False])
@pytest.mark.parametrize("length", range(9))
def test_garbage_inside_the_handshake(dials: bool, length: int) -> None:
    """Whatever the garbage, at whatever message: no exception but Refusal, nothing established."""
    recorded = messages(N1, N2)
    for step in range(0 if dials else 1, 5, 2):
        for garbage in (b"\0" * 64, b"\xff" * 64, b"\0\0\1" + b"z" * 64, b"\x0f\xff\2" * 30):
            one = side(dials, N1 if dials else N2)
            try:
                for message in recorded[1 if dials else 0 : step : 2]:
                    one.receive(message)
                    one.take_out()
                one.receive(garbage[length:])
            except Refusal:
                pass
            assert not one.established


def test_a_stranger_cannot_make_a_node_keep_much() -> None:
    acceptor = side(False, N2)
    acceptor.receive(side(True, N1).take_out())
    with pytest.raises(Refusal, match="1 bytes"):
        acceptor.receive(b"\0\1\1")
    dialler = side(True, N1)
    dialler.receive(side(False, N2)._own_preamble)
    with pytest.raises(Refusal, match="bytes"):
        dialler.receive((BODY_BYTES_MAX + 1).to_bytes(2, "big") + b"\2")


def speaking(identity: PeerIdentity, lowest: int, highest: int) -> PeerIdentity:
    return replace(identity, wire_lowest=lowest, wire_version=highest)


def refusal_of(one: Handshake, data: bytes) -> str:
    """The text of the refusal when a peer has sent this and has closed the connection."""
    try:
        one.receive(data)
    except Refusal as refusal:
        return str(refusal)
    return str(one.cut_short())


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ((1, 1), (2, 2), ("1", "2")),
        ((2, 2), (1, 1), ("2", "1")),
        ((1, 1), (0x4854, 0x4854), ("1", "18516")),
        ((1, 2), (3, 4), ("1 to 2", "3")),
        ((3, 4), (1, 2), ("3 to 4", "1")),
    ],
)
def test_other_wire_versions_are_refused_on_both_sides(
    ours: tuple[int, int], theirs: tuple[int, int], text: tuple[str, str]
) -> None:
    dialler, acceptor = side(True, speaking(N1, *ours)), side(False, speaking(N2, *theirs))
    there = refusal_of(acceptor, dialler.take_out())
    here = refusal_of(dialler, acceptor.take_out()[:10])
    older, newer = ("this node", "that node") if ours < theirs else ("that node", "this node")
    assert here == f"speaks wire version {text[1]}, this node speaks {text[0]}: upgrade {older}"
    assert there.startswith(f"speaks wire version {ours[0]}, this node speaks {theirs[0]}")
    assert there.endswith(f": upgrade {newer}")


@pytest.mark.parametrize(
    ("first", "second", "agreed"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((1, 3), (2, 4), 3),
        ((2, 2), (1, 5), 2),
    ],
)
@pytest.mark.parametrize("dials", ["first", "second"])
def test_the_highest_common_version_is_spoken(
    first: tuple[int, int], second: tuple[int, int], agreed: int, dials: str
) -> None:
    ranges = (first, second) if dials == "first" else (second, first)
    dialler, acceptor = side(True, speaking(N1, *ranges[0])), side(False, speaking(N2, *ranges[1]))
    talk(dialler, acceptor)
    for one in (dialler, acceptor):
        assert one.established
        assert one.peer is not None
        assert one.peer.wire_version == agreed


def test_ranges_without_a_common_version_are_told_apart() -> None:
    """The preambles alone do not show it: the lowest versions would fit."""
    dialler, acceptor = side(True, speaking(N1, 2, 2)), side(False, speaking(N2, 3, 4))
    # A later version than the first accepts lower numbers than its own lowest in a preamble.
    acceptor.receive(dialler.take_out())
    assert refusal_of(dialler, acceptor.take_out()).endswith(
        "this node speaks 2: upgrade this node"
    )
    assert str(acceptor.cut_short()).endswith("this node speaks 3 to 4: upgrade that node")


def test_a_peer_cannot_be_talked_down() -> None:
    """A preamble that was changed on the way fails the first code of the transcript."""
    dialler, acceptor = side(True, speaking(N1, 2, 3)), side(False, speaking(N2, 1, 3))
    preamble = bytearray(dialler.take_out())
    preamble[9] = 1
    acceptor.receive(bytes(preamble))
    dialler.receive(acceptor.take_out())
    with pytest.raises(Refusal) as refused:
        acceptor.receive(dialler.take_out())
    assert refused.value.reason == "secret"


@pytest.mark.parametrize("version", [None, "2", 0, 1.5, 1 << 16, True])
def test_a_version_that_is_none(version: object) -> None:
    dialler, acceptor = side(True, N1), side(False, N2)
    said = json.dumps({**asdict(N1), "wire_version": version}).encode()
    dialler._say_identity = lambda: dialler._say(2, said)  # type: ignore[method-assign]
    with pytest.raises(Refusal, match="identity whose wire version"):
        talk(dialler, acceptor)


@pytest.mark.parametrize(("first", "second"), [(N1, N2), (N2, N1)])
@pytest.mark.parametrize("refuser", ["n1", "n2"])
@pytest.mark.parametrize("reason", ["cluster", "linked"])
def test_the_one_refused_is_told_why(
    first: PeerIdentity, second: PeerIdentity, refuser: str, reason: str
) -> None:
    def judge(peer: PeerIdentity, last: bool) -> Refusal | None:
        return Refusal(reason, "for this reason", quiet=reason == "linked")

    dialler = side(True, first, judge=judge if first.node_id == refuser else nobody_minds)
    acceptor = side(False, second, judge=judge if second.node_id == refuser else nobody_minds)
    ends = {first.node_id: dialler, second.node_id: acceptor}
    with pytest.raises(Refusal, match=r"^for this reason$"):
        talk(dialler, acceptor)
    told = ends["n2" if refuser == "n1" else "n1"]
    with pytest.raises(Refusal) as caught:
        told.receive(ends[refuser].take_out())
    assert "for this reason" in str(caught.value)
    assert caught.value.quiet == (reason == "linked")
    assert not dialler.established
    assert not acceptor.established


BODIES = [
    b"",
    b"{",
    b"[]",
    b"\xff",
    b"[" * 4096,
    b"{}",
    json.dumps({"node_id": "n1"}).encode(),
]


@pytest.mark.parametrize("body", BODIES)
def test_an_identity_that_cannot_be_read(body: bytes) -> None:
    dialler, acceptor = side(True, N1), side(False, N2)
    acceptor.receive(dialler.take_out())
    dialler.receive(acceptor.take_out())
    acceptor.receive(dialler.take_out())
    dialler._transcript.update(acceptor.take_out())
    dialler._say(2, body)
    with pytest.raises(Refusal) as caught:
        acceptor.receive(dialler.take_out())
    assert caught.value.reason == "handshake"


@pytest.mark.parametrize(
    "wrong",
    [
        {"node_id": "n 1"},
        {"node_id": ""},
        {"node_id": "n" * 33},
        {"role": "king"},
        {"client_address": "x" * 257},
        {"admin_address": "two\nlines"},
        {"process": "\ud800"},
    ],
)
def test_an_identity_that_is_none(wrong: dict[str, str]) -> None:
    with pytest.raises(Refusal) as caught:
        talk(side(True, replace(N1, **wrong)), side(False, N2))  # type: ignore[arg-type]
    assert caught.value.reason == "handshake"
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("dials", "heard", "quiet"), [(True, 0, False), (False, 0, True), (False, 1, False)]
)
def test_a_connection_that_is_closed_early(dials: bool, heard: int, quiet: bool) -> None:
    one = side(dials, N1)
    one.receive(messages(N1, N2)[0][:heard])
    assert one.cut_short().quiet == quiet
    assert one.cut_short().reason == "closed"
