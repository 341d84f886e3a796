"""Nodes' links in one event loop, with a record of what their handlers were told."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import uvloop

from holdfast.io.peers.links import BOUNDS, PeerAuth, PeerIdentity, PeerLinks
from holdfast.node.frame_kinds import BadFrame
from tests.support.ports import free_port

SECRET = b"a secret of the nodes, 32 or more"
TIMEOUT_S = 30.0
BAD_KIND = 99
"""Frames of this kind cannot be read."""


def run(test: Callable[[], Awaitable[None]], timeout_s: float = 60.0, loop: str = "uvloop") -> None:
    """With the loop that production uses, or asyncio's own."""

    async def limited() -> None:
        await asyncio.wait_for(test(), timeout_s)

    if loop == "uvloop":
        uvloop.run(limited())
    else:
        asyncio.run(limited())


async def until(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "in vain"
        await asyncio.sleep(0.002)


class PeerNode:
    """One node's links. `events` has ("connected" | "disconnected" | "refused", node id)."""

    def __init__(
        self, node_id: str, auth: PeerAuth | None = None, port: int = 0, **changes: Any
    ) -> None:
        """`changes` are fields of the identity or of the bounds."""
        bounds = {
            name: changes.pop(name)
            for name in ("frame_bytes_max", "send_bytes_max", "handshake_timeout_s")
            if name in changes
        }
        port = port or free_port()
        self.node_id = node_id
        self.address = f"127.0.0.1:{port}"
        fields = {"incarnation": f"incarnation-of-{node_id}", "peer_address": self.address}
        self.events: list[tuple[str, str]] = []
        self.frames: list[tuple[str, int, bytes]] = []
        self.identities: dict[str, PeerIdentity] = {}
        self.answers = False
        """Whether every frame is sent back."""
        self.is_apart = False
        self.links = PeerLinks(
            asyncio.get_running_loop(),
            PeerIdentity(node_id, **(fields | changes)),
            PeerAuth(SECRET) if auth is None else auth,
            self,
            "127.0.0.1",
            port,
            replace(BOUNDS, **bounds),
        )

    def on_connected(self, identity: PeerIdentity) -> None:
        self.events.append(("connected", identity.node_id))
        self.identities[identity.node_id] = identity

    def on_disconnected(self, node_id: str) -> None:
        self.events.append(("disconnected", node_id))

    def on_refused(self, node_id: str) -> None:
        self.events.append(("refused", node_id))

    def on_removed(self) -> None:
        self.events.append(("removed", ""))

    def on_older_copy(self, text: str, may_begin_anew: bool) -> None:
        """As the broker does, which has all links closed."""
        self.events.append(("begins anew" if may_begin_anew else "stands apart", ""))
        if not self.is_apart:
            self.is_apart = True
            self.links.isolate("its disk is an older copy")

    def on_frame(self, node_id: str, kind: int, payload: bytes) -> None:
        if kind == BAD_KIND:
            raise BadFrame("it is bad")
        self.frames.append((node_id, kind, payload))
        if self.answers:
            self.links.send(node_id, kind, payload)

    def linked(self) -> list[str]:
        return sorted(identity.node_id for identity in self.links.connected())

    def refusals(self, *reasons: str) -> int:
        return sum(self.links.metrics.refused.get(reason, 0) for reason in reasons)


class Mesh:
    """`async with Mesh() as mesh`: what was started is stopped."""

    def __init__(self) -> None:
        self.nodes: list[PeerNode] = []

    async def __aenter__(self) -> "Mesh":
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.links.stop()

    async def start(
        self, node_id: str, auth: PeerAuth | None = None, port: int = 0, **changes: Any
    ) -> PeerNode:
        node = PeerNode(node_id, auth, port, **changes)
        self.nodes.append(node)
        await node.links.start()
        return node
