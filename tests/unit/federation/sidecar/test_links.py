"""Links of members over real sockets: who gets one, what goes over it, what it costs."""

import asyncio
import logging
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.link import BUSY_BYTES, LinkBounds
from holdfast.io.peers.mesh import GREETINGS_MAX
from holdfast.security.peer_handshake import MAGIC
from holdfast.security.peer_identity import PeerIdentity
from holdfast_federation.sidecar.links import BOUNDS, PING_S, MemberLinks, identity_of
from tests.support import peer_mesh
from tests.support.ports import free_port
from tests.support.scripted_edge import until

SECRET = b"a secret of the members, 32 or more"
A, B, C = b"\x01" * 16, b"\x02" * 16, b"\x03" * 16
LOOPS = pytest.mark.parametrize("loop", ["uvloop", "asyncio"])


_started: list["Member"] = []


def run(test: Callable[[], Awaitable[None]], loop: str = "uvloop") -> None:
    """Whatever happens, what was started is stopped: a loop with timers does not close."""

    async def stopped() -> None:
        try:
            await test()
        finally:
            await stop(*_started)
            _started.clear()

    peer_mesh.run(stopped, loop=loop)


class Member:
    def __init__(
        self,
        node: bytes,
        auth: PeerAuth | None = None,
        federation: str = "f",
        bounds: LinkBounds = BOUNDS,
        identity: PeerIdentity | None = None,
        port: int = 0,
        ping_s: float = PING_S,
    ) -> None:
        self.node = node
        self.address = f"127.0.0.1:{port or free_port()}"
        self.events: list[tuple[str, bytes]] = []
        self.frames: list[tuple[bytes, bytes]] = []
        self.busy: list[bool] = []
        self.stirred = 0
        self.finds: list[tuple[str, bytes]] = []
        self.links = MemberLinks(
            self,
            identity or identity_of(node, federation, self.address),
            PeerAuth(SECRET) if auth is None else auth,
            bounds,
            ping_s,
        )

    async def start(self) -> "Member":
        _started.append(self)
        await self.links.start(self.address)
        return self

    def link_up(self, peer: bytes) -> None:
        self.events.append(("up", peer))

    def link_down(self, peer: bytes) -> None:
        self.events.append(("down", peer))

    def link_busy(self, peer: bytes, is_busy: bool) -> None:
        self.busy.append(is_busy)

    def link_frame(self, peer: bytes, data: bytes) -> None:
        self.frames.append((peer, data))

    def link_stirred(self, peer: bytes) -> None:
        self.stirred += 1

    def found(self, address: str, peer: bytes) -> None:
        self.finds.append((address, peer))

    def refused(self, reason: str) -> int:
        return self.links.metrics.refused.get(reason, 0)


async def stop(*members: Member) -> None:
    for member in members:
        await member.links.stop()


async def linked(*members: Member) -> None:
    await until(lambda: all(len(member.links.linked()) == 1 for member in members), "links")


@LOOPS
def test_both_dial_and_one_link_stays(loop: str) -> None:
    async def test() -> None:
        one, other = await Member(A).start(), await Member(B).start()
        for _ in range(20):
            one.links.dial(B, other.address)
            other.links.dial(A, one.address)
            await linked(one, other)
            for number in range(50):
                assert one.links.forward(B, b"%d" % number)
                assert other.links.forward(A, b"%d" % number)
            await until(lambda: len(one.frames) == len(other.frames) == 50, "frames")
            assert one.frames == [(B, b"%d" % number) for number in range(50)]
            assert other.frames == [(A, b"%d" % number) for number in range(50)]
            one.links.disconnect(B, "enough")
            await until(lambda: not other.links.linked(), "the end")
            assert one.events == [("up", B)]
            assert other.events == [("up", A), ("down", A)]
            # The loser of the two connections may still be on its way.
            await until(lambda: not one.links._dials and not other.links._dials, "dials")
            for member in (one, other):
                for peer in list(member.links.linked()):
                    member.links.disconnect(peer, "late")
            await until(lambda: not one.links.linked() and not other.links.linked(), "the end")
            for member in (one, other):
                member.events.clear()
                member.frames.clear()

    run(test, loop=loop)


@pytest.mark.parametrize(
    ("auth", "federation", "reason", "there", "texts"),
    [
        (
            PeerAuth(b"x" * 40),
            "f",
            "secret_there",
            "secret",
            ("does not know this federation's secret (federation.secret_file)", "has it the same"),
        ),
        (PeerAuth(), "f", "secret_there", "secret", ("does not know this federation's secret",)),
        (
            None,
            "other",
            "federation",
            "refused_there",
            ("belongs to the federation 'f'", "'other'", "see federation.name"),
        ),
    ],
    ids=["secret", "no secret", "name"],
)
def test_strangers_are_refused_with_a_word_on_both_sides(
    auth: PeerAuth | None,
    federation: str,
    reason: str,
    there: str,
    texts: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        member = await Member(A).start()
        stranger = await Member(B, auth, federation).start()
        with caplog.at_level(logging.WARNING):
            for _ in range(10):
                stranger.links.dial(A, member.address)
                await until(lambda: not stranger.links._dials, "an answer")
            await until(lambda: member.refused(there) + member.refused(reason) == 10, "refusals")
        assert stranger.refused(reason) + stranger.refused(there) == 10
        assert member.events == stranger.events == []
        lines = [record.getMessage() for record in caplog.records]
        # Ten tries are not ten lines.
        assert len(lines) == 2, lines
        assert all(line.startswith("federation_problem text=") for line in lines)
        for text in texts:
            assert any(text in line for line in lines), lines

    run(test)


def test_another_version_and_another_kind_of_port(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        member = await Member(A).start()
        newer = PeerIdentity(B.hex(), "", "f", 9)
        other = await Member(B, identity=newer).start()
        other.links.dial(A, member.address)
        await until(lambda: member.refused("version") == 1, "version")
        await until(lambda: other.refused("version") == 1, "version there")
        assert "speaks wire version 9, this federator speaks 2: upgrade this federator" in (
            caplog.text
        )
        for text in (MAGIC + b"\0\1" + bytes(32), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\0"):
            reader, writer = await asyncio.open_connection(*member.address.split(":"))
            writer.write(text)
            await reader.read()
            writer.close()
        await until(lambda: member.refused("magic") == 2, "magic")
        await until(lambda: member.refused("tls") == 1, "TLS")
        assert "is no Holdfast federator" in caplog.text
        assert member.events == []

    run(test)


def test_strangers_that_hold_connections_do_not_keep_members_out() -> None:
    async def test() -> None:
        member = await Member(A, bounds=replace(BOUNDS, handshake_timeout_s=30)).start()
        held = []
        for _ in range(GREETINGS_MAX + 30):
            _, writer = await asyncio.open_connection(*member.address.split(":"))
            writer.write(MAGIC[:3])
            held.append(writer)
        other = await Member(B).start()
        other.links.dial(A, member.address)
        await linked(member, other)
        assert len(member.links._open) <= GREETINGS_MAX + 2
        for writer in held:
            writer.close()

    run(test)


def test_silence_is_given_up() -> None:
    async def test() -> None:
        member = await Member(A, bounds=replace(BOUNDS, handshake_timeout_s=0.2)).start()
        reader, writer = await asyncio.open_connection(*member.address.split(":"))
        assert await asyncio.wait_for(reader.read(), 30) == b""
        await until(lambda: member.refused("timeout") == 1, "timeout")
        writer.close()

    run(test)


def test_garbage_behind_a_proper_handshake(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        member = await Member(A, bounds=replace(BOUNDS, frame_bytes_max=1000)).start()
        other = await Member(B).start()
        other.links.dial(A, member.address)
        await linked(member, other)
        other.links.forward(A, bytes(1001))
        await until(lambda: member.events[-1:] == [("down", B)], "the end")
        assert "sent a frame of kind 0 with 1001 bytes, more than 1000" in caplog.text
        other.links.dial(A, member.address)
        await linked(member, other)
        # Kinds that nobody knows yet are passed over; so are tokens that are none.
        link = other.links.linked()[A]
        for kind in (1, 2, 77):
            link.send(kind, b"what")
        other.links.forward(A, b"good")
        await until(lambda: member.frames == [(B, b"good")], "the frame behind them")
        assert member.links.linked()

    run(test)


def test_two_with_one_id(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        one, other = await Member(A).start(), await Member(A).start()
        other.links.dial(B, one.address)
        await until(lambda: other.links.metrics.refused, "refusal")
        await until(lambda: one.refused("same_id") + one.refused("refused_there") == 1, "there")
        assert not one.links.linked()
        itself = await Member(C).start()
        itself.links.find([itself.address])
        await until(lambda: itself.refused("self"), "itself")
        assert itself.finds == []

    run(test)


def test_a_member_that_was_restarted_takes_the_place_of_its_last_life() -> None:
    async def test() -> None:
        member = await Member(A).start()
        last_life = await Member(B).start()
        last_life.links.dial(A, member.address)
        await linked(member, last_life)
        new_life = await Member(B).start()
        new_life.links.dial(A, member.address)
        await until(lambda: len(member.events) == 3, "the new life")
        assert member.events == [("up", B), ("down", B), ("up", B)]
        assert member.links.linked()[B].remote != last_life.address
        # The two ends do not have the link at the same moment, and a frame without one is dropped.
        await linked(new_life)
        assert new_life.links.forward(A, b"new")
        await until(lambda: member.frames == [(B, b"new")], "the frame")

    run(test)


@LOOPS
def test_a_peer_that_does_not_read(loop: str) -> None:
    """It counts as busy, costs a bounded buffer, and loses what is beyond it, not the link."""

    async def test() -> None:
        bounds = replace(BOUNDS, send_bytes_max=4 << 20)
        member = await Member(A, bounds=bounds).start()
        slow = await Member(B).start()
        slow.links.dial(A, member.address)
        await linked(member, slow)
        transport = slow.links.linked()[A]._transport
        assert transport is not None
        transport.pause_reading()
        sent = 0
        frame = bytes(100_000)
        while not member.links.dropped["buffer full"]:
            sent += member.links.forward(B, frame)
            assert sent < 2000
            await asyncio.sleep(0)
        assert member.busy == [True]
        assert member.links.pending_bytes(B.hex()) > BUSY_BYTES
        assert member.links.pending_bytes(B.hex()) <= (4 << 20) + 2 * len(frame)
        transport.resume_reading()
        await until(lambda: len(slow.frames) == sent, "what was sent")
        await until(lambda: member.busy == [True, False], "not busy any more")
        assert member.links.linked()
        assert slow.links.linked()

    run(test, loop=loop)


def test_bytes_of_a_large_frame_are_a_sign_of_life() -> None:
    async def test() -> None:
        member, other = await Member(A).start(), await Member(B).start()
        other.links.dial(A, member.address)
        await linked(member, other)
        # The beginning of a frame that never ends.
        transport = other.links.linked()[A]._transport
        assert transport is not None
        transport.write(struct.pack(">IB", 1 << 20, 0))
        before = member.stirred
        for _ in range(3):
            seen = member.stirred
            await asyncio.sleep(0.26)
            transport.write(bytes(1000))
            await until(lambda seen=seen: member.stirred > seen, "a sign")  # type: ignore[misc]
        assert member.stirred > before
        assert member.frames == []

    run(test)


def test_frames_that_have_nowhere_to_go() -> None:
    async def test() -> None:
        member = await Member(A, bounds=replace(BOUNDS, frame_bytes_max=10)).start()
        assert not member.links.forward(B, b"x")
        other = await Member(B).start()
        other.links.dial(A, member.address)
        await linked(member, other)
        assert not member.links.forward(B, bytes(11))
        assert member.links.dropped == {"not linked": 1, "too large": 1}

    run(test)


def test_addresses(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        member = await Member(A).start()
        for address in ("", "nowhere", "host:port", "host:99999999", "a b:1", "[::1"):
            member.links.dial(B, address)
        assert "not host:port" in caplog.text
        nobody = free_port()
        member.links.dial(B, f"127.0.0.1:{nobody}")
        member.links.dial(B, f"127.0.0.1:{nobody}")
        assert member.links.metrics.dials == 0
        await until(lambda: not member.links._dials, "an answer")
        assert member.links.metrics.dials == 1
        assert member.refused("nobody") == 1
        for address in ("256.256.256.256:1", "\0:1"):
            member.links.dial(B, address)
            await until(lambda: not member.links._dials, "an answer")
        assert member.refused("unreachable") == 2
        await until(lambda: not member.links._dials, "an answer")
        other = await Member(C).start()
        member.links.dial(B, other.address)
        await until(lambda: member.refused("unexpected") or other.refused("unexpected"), "who")
        assert f"{C.hex()} answers where {B.hex()} should be" in caplog.text
        assert not member.links.linked()

    run(test)


def test_who_answers_at_an_address() -> None:
    """It is sought until somebody answers, and again when another one does."""

    async def test() -> None:
        member = await Member(A).start()
        port = free_port()
        address = f"127.0.0.1:{port}"
        member.links.find([address])
        await until(lambda: member.refused("nobody") >= 2, "tries")
        first = await Member(B, port=port).start()
        await until(lambda: member.finds == [(address, B)], "the first")
        await stop(first)
        await until(lambda: member.events[-1:] == [("down", B)], "its end")
        tries = member.links.metrics.dials
        await Member(C, port=port).start()
        member.links.dial(B, address)
        await until(lambda: member.finds == [(address, B), (address, C)], "the second")
        assert member.links.metrics.dials > tries

    run(test)


def test_round_trips() -> None:
    async def test() -> None:
        member, other = await Member(A, ping_s=0.02).start(), await Member(B).start()
        other.links.dial(A, member.address)
        await linked(member, other)
        link = member.links.linked()[B]
        await until(lambda: link.rtt_s is not None, "a round trip")
        assert link.rtt_s is not None
        assert 0 < link.rtt_s < 30

    run(test)


def certified(ca: trustme.CA, directory: Path, node: bytes) -> PeerAuth:
    directory.mkdir()
    certificate = ca.issue_cert(node.hex())
    certificate.private_key_pem.write_to_path(str(directory / "key.pem"))
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(str(directory / "cert.pem"), append=True)
    ca.cert_pem.write_to_path(str(directory / "ca.pem"))

    class Files:
        secret_file = ""
        certificate = str(directory / "cert.pem")
        key = str(directory / "key.pem")
        ca = str(directory / "ca.pem")

    return PeerAuth.load(Files())


@LOOPS
def test_certificates_are_for_ids(
    tmp_path: Path, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ca = trustme.CA()
        one = await Member(A, certified(ca, tmp_path / "a", A)).start()
        other = await Member(B, certified(ca, tmp_path / "b", B)).start()
        other.links.dial(A, one.address)
        await linked(one, other)
        transport = one.links.linked()[B]._transport
        assert transport is not None
        assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        other.links.forward(A, bytes(3 << 20))
        await until(lambda: one.frames == [(B, bytes(3 << 20))], "a large frame")

        false = await Member(C, certified(ca, tmp_path / "c", B)).start()
        false.links.dial(A, one.address)
        await until(lambda: one.refused("certificate"), "refusal")
        assert f"the certificate of {C.hex()} is for {B.hex()}" in caplog.text
        stranger = await Member(C, certified(trustme.CA(), tmp_path / "d", C)).start()
        stranger.links.dial(A, one.address)
        await until(lambda: stranger.links.metrics.refused, "refusal of a stranger")
        plain = await Member(C).start()
        plain.links.dial(A, one.address)
        await until(lambda: plain.links.metrics.refused, "refusal of one without TLS")
        assert [event for event in one.events if event[1] == C] == []
        assert not one.links._auth.client or one.links._auth.client.verify_mode == ssl.CERT_REQUIRED

    run(test, loop=loop)
