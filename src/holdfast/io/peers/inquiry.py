"""A question to a node before this one has a data directory: the identity of the node there.

The dialler of a handshake receives the other identity before it shows its own. So it can stop
there, and the other node never takes it for one that joins.
"""

import asyncio
from typing import cast

from holdfast.io.peers.authentication import PeerAuth
from holdfast.io.peers.dialer import connect
from holdfast.io.peers.link import PeerLink, PeerMetrics, failure
from holdfast.io.peers.links import BOUNDS
from holdfast.security.peer_handshake import CLUSTER, INQUIRY
from holdfast.security.peer_identity import NO_REPLY, PeerIdentity, Refusal


class _Inquiry:
    """The owner of the one connection."""

    def __init__(self) -> None:
        self.metrics = PeerMetrics()
        self.found: PeerIdentity | None = None

    def judge(self, link: PeerLink, peer: PeerIdentity, last: bool) -> Refusal | None:
        self.found = peer
        return Refusal(INQUIRY, "asks which cluster this is", quiet=True)

    def established(self, link: PeerLink) -> None:
        raise AssertionError("an inquiry becomes no link")

    def received(self, link: PeerLink, kind: int, payload: bytes) -> None:
        raise AssertionError("an inquiry receives no frame")

    def broken_off(self, link: PeerLink, text: str) -> None:
        pass

    def stirred(self, link: PeerLink) -> None:
        pass

    def busy(self, link: PeerLink) -> None:
        pass

    def closed(self, link: PeerLink) -> None:
        pass


async def ask_identity(address: str, own: PeerIdentity, auth: PeerAuth) -> PeerIdentity:
    """Returns the identity of the node at an address. Raises `Refusal` with the reason if there is
    none."""
    loop = asyncio.get_running_loop()
    owner = _Inquiry()
    link = PeerLink(
        owner, loop, own, BOUNDS, secret=auth.secret, realm=CLUSTER, dials=True, remote=address,
        expected="",
    )  # fmt: skip
    try:
        async with asyncio.timeout(BOUNDS.handshake_timeout_s):
            await connect(loop, address, cast(asyncio.BaseProtocol, link), auth.client)
            await link.settled
    except TimeoutError:
        link.abort()
        raise Refusal("timeout", NO_REPLY) from None
    except OSError as error:
        raise failure(error) from None
    if owner.found is not None:
        return owner.found
    assert link.refusal is not None
    raise link.refusal
