"""Finds a member's desired neighbours, from its settings and its manager."""

import asyncio
from typing import Protocol

from holdfast.config.federation import Federation, label_of, peer_of
from holdfast.io.event_loop.failures import report
from holdfast_federation.core.member import FederationMember
from holdfast_federation.sidecar.links import MemberLinks
from holdfast_federation.sidecar.manager_client.client import LinkState, ManagerClient
from holdfast_federation.sidecar.manager_client.http import ManagerHttp
from holdfast_federation.sidecar.store.member_files import MemberStorage


class Managed(Protocol):
    """The federator, as the sources of its neighbours see it."""

    settings: Federation

    @property
    def node(self) -> bytes: ...
    @property
    def epoch(self) -> int: ...
    @property
    def member(self) -> FederationMember: ...
    @property
    def links(self) -> MemberLinks: ...

    def set_desired(self, links: dict[bytes, str]) -> None: ...


class NeighbourSources:
    """Merges the peers of the settings with those of the manager, as the client's ManagedMember.

    A peer of the settings takes precedence over the manager's address for the same id.
    """

    def __init__(self, federator: Managed, state: MemberStorage) -> None:
        """Reads the peers of the settings. Raises `TlsError` if the manager's files are bad."""
        self._federator = federator
        settings = federator.settings
        peers = [peer_of(text) for text in settings.peers]
        self._fixed = {bytes.fromhex(id): address for id, address in peers if id}
        self._unnamed = [address for id, address in peers if not id]
        # The ids found at the addresses that the settings name without an id.
        self._found: dict[str, bytes] = {}
        self._managed: dict[bytes, str] = {}
        self._task: asyncio.Task[None] | None = None
        self.client: ManagerClient | None = None
        if settings.manager:
            self.client = ManagerClient(
                ManagerHttp(
                    settings.manager,
                    settings.manager_ca,
                    settings.manager_certificate,
                    settings.manager_key,
                ),
                self,
                {
                    "ip": settings.broker,
                    "uuid": federator.node.hex(),
                    "epoch": federator.epoch,
                    "advertise": federator.links.identity.peer_address,
                    "labels": dict(label_of(label) for label in settings.labels),
                    "capacity": settings.capacity,
                },
                settings.manager_token_file,
                state,
            )

    def start(self) -> None:
        """Reports fixed peers, looks for those without an id, and starts the manager's client."""
        if self._fixed:
            self._report()
        self._federator.links.find(self._unnamed)
        if self.client is not None:
            self._task = asyncio.get_running_loop().create_task(self.client.run())
            self._task.add_done_callback(report)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def leave(self) -> None:
        """Stops the manager's client and leaves the manager's graph."""
        await self.stop()
        if self.client is not None:
            await self.client.leave()

    def found(self, address: str, peer: bytes) -> None:
        """Adds the peer found at a configured address. Of several, its last one counts."""
        if self._found.get(address) != peer or next(reversed(self._found)) != address:
            self._found.pop(address, None)
            self._found[address] = peer
            self._report()

    def _report(self) -> None:
        found = {peer: address for address, peer in self._found.items()}
        self._federator.set_desired(self._managed | found | self._fixed)

    # ManagedMember

    def links(self) -> dict[bytes, LinkState]:
        return {
            node: LinkState(None if link.rtt_s is None else 1e3 * link.rtt_s)
            for node, link in self._federator.links.linked().items()
        }

    def digest(self) -> bytes:
        return self._federator.member.database.digest

    def interest(self) -> int:
        return len(self._federator.member.database.entries[self._federator.node].filters)

    def set_neighbours(self, neighbours: dict[bytes, str]) -> None:
        """Replaces the neighbours that the manager assigns."""
        self._managed = neighbours
        self._report()
