"""The ports between nodes and between members: strangers, and a peer that knows the secret and says
what no peer says."""

import os
import random
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.node import frame_kinds as kinds
from holdfast.security.peer_handshake import (
    CLUSTER,
    FEDERATION,
    Handshake,
    Realm,
)
from holdfast.security.peer_identity import PeerIdentity, Refusal
from holdfast_federation.core.config import FederationConfig
from holdfast_federation.sidecar.links import identity_of
from tests.e2e.brokers import Broker
from tests.e2e.cluster_processes import SECRET, ClusterProcesses
from tests.e2e.federated import Member
from tests.e2e.pair import wait_until
from tests.fuzz.doors import CLOSE_S, ONE_NODE, exchange
from tests.fuzz.mutation import NUMBERS, damage, noise

FRAME: Final = struct.Struct(">IB")
KINDS: Final = sorted(
    number for name, number in vars(kinds).items() if name.isupper() and isinstance(number, int)
)
CAPTURED_BYTES_MAX: Final = 4096


class Peer:
    """One connection of one that knows the secret."""

    def __init__(self, port: int, identity: PeerIdentity, realm: Realm, secret: bytes) -> None:
        """Raises Refusal, OSError."""
        self.frames: list[tuple[int, bytes]] = []
        self._buffer = b""
        self.socket = socket.create_connection(("127.0.0.1", port), CLOSE_S)
        shake = Handshake(True, identity, secret, os.urandom(32), lambda peer, last: None, realm)
        while not shake.established:
            self.socket.sendall(shake.take_out())
            data = self.socket.recv(1 << 16)
            if not data:
                raise shake.cut_short()
            shake.receive(data)
        self.socket.sendall(shake.take_out())
        self._take(shake.rest)

    def listen(self, seconds: float) -> None:
        """Keep what the other side says; it goes on for ever."""
        deadline = time.monotonic() + seconds
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self.socket.settimeout(left_s)
                data = self.socket.recv(1 << 16)
                if not data:
                    return
                self._take(data)
        except OSError:
            pass
        finally:
            self.socket.settimeout(CLOSE_S)

    def say(self, kind: int, payload: bytes) -> None:
        self.socket.sendall(FRAME.pack(len(payload), kind) + payload)

    def _take(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= FRAME.size:
            length, kind = FRAME.unpack_from(self._buffer)
            if len(self._buffer) < FRAME.size + length:
                return
            payload = self._buffer[FRAME.size : FRAME.size + length]
            self.frames.append((kind, payload))
            self._buffer = self._buffer[FRAME.size + length :]


class PeersDoor:
    """Of a cluster of one node, to which the fuzzer comes as another."""

    name = "peers"
    realm = CLUSTER
    kinds: Sequence[int] = KINDS
    expected: Sequence[str] = ()

    def __init__(self) -> None:
        self.processes: list[Broker] = []
        self.canary_port = 0
        self._captured: dict[int, list[bytes]] = {}
        self._names = 0

    def start(self, directory: Path) -> None:
        self.cluster = ClusterProcesses(directory, 1, {"cluster": dict(ONE_NODE)})
        node = self.cluster.nodes["n1"]
        self.processes = [node]
        self.cluster.start()
        self.canary_port, self.port = node.port, node.peer_port
        self.secret = SECRET.strip().encode()

    def identity(self) -> PeerIdentity:
        self._names += 1
        cluster_id = str(self.cluster.nodes["n1"].cluster()["cluster_id"])
        return PeerIdentity(
            f"z{self._names}", os.urandom(8).hex(), cluster_id, process=os.urandom(8).hex()
        )

    def case(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            exchange(self.port, [self._greeting(rng)])
            return "stranger"
        try:
            peer = Peer(self.port, self.identity(), self.realm, self.secret)
        except Refusal as refusal:
            return f"refused {refusal.reason}"
        except ConnectionRefusedError:
            return self.nobody_listens()
        except OSError:
            return "cut"
        with peer.socket:
            peer.listen(rng.choice((0.0, 0.01, 0.3)))
            for kind, payload in peer.frames:
                kept = self._captured.setdefault(kind, [])
                if len(payload) <= CAPTURED_BYTES_MAX and len(kept) < 50:
                    kept.append(payload)
            try:
                for _ in range(rng.choice((1, 5, 30))):
                    peer.say(*self._frame(rng))
                peer.listen(0.01)
            except OSError:
                return "link broken"
        return "link"

    def nobody_listens(self) -> str:
        raise AssertionError("nobody listens any more")

    def _greeting(self, rng: random.Random) -> bytes:
        shake = Handshake(
            True, self.identity(), self.secret, os.urandom(32), lambda peer, last: None, self.realm
        )
        good = shake.take_out()
        return noise(rng) if rng.random() < 0.2 else damage(rng, good, [good]) + noise(rng)

    def _frame(self, rng: random.Random) -> tuple[int, bytes]:
        kind = rng.choice(self.kinds)
        corpus = self._captured.get(kind) or [
            bytes(rng.choice((0, 1, 8, 40))),
            b"".join(struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF) for _ in range(4)),
        ]
        if rng.random() < 0.1:
            return rng.randrange(256), noise(rng)
        return kind, damage(rng, rng.choice(corpus), corpus)

    def end(self) -> None:
        self.cluster.end()


class FederationDoor(PeersDoor):
    """Of a member without signatures, with one honest neighbour. An unsigned later start of the
    member, made up by one of two peers, makes it begin again once in `claim_s`, not more often."""

    name = "federation"
    realm = FEDERATION
    kinds: Sequence[int] = (0, 1, 2)
    expected: Sequence[str] = ("others know start", "federation_down")

    def start(self, directory: Path) -> None:
        secret_file = directory / "federation.secret"
        secret_file.write_text(SECRET)
        secret_file.chmod(0o600)
        settings = {"federation": {"name": "fuzzed", "secret_file": str(secret_file)}}
        self.member = Member(directory, "one", settings)
        self.neighbour = Member(directory, "two", settings)
        self.neighbour.link_to(self.member)
        self.processes = [self.member, self.neighbour]
        for process in self.processes:
            process.start()
        wait_until(lambda: self.member.is_linked(1), "a link")
        self._began_at = time.monotonic()
        self.canary_port, self.port = self.member.port, self.member.federation_port
        self.secret = SECRET.strip().encode()

    def identity(self) -> PeerIdentity:
        return identity_of(os.urandom(16), "fuzzed", "127.0.0.1:1")

    def nobody_listens(self) -> str:
        wait_until(lambda: self.member.is_linked(1), "it has begun again, and is linked")
        begun = int(self.member.federation()["restarts"])
        lived_s = time.monotonic() - self._began_at
        assert begun <= lived_s / FederationConfig().claim_s, f"begun {begun} times"
        return "begun again"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
