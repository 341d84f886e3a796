"""The process behind the admin port, as its routes, its metrics and its readiness see it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.api.access.audit import AuditLog
from holdfast.api.cluster_operations import ClusterOperations
from holdfast.config.explain import Setting
from holdfast.config.schema import Config
from holdfast.io.disk.maintenance import Maintenance
from holdfast.io.disk.shared_directory import SharedDirectory
from holdfast.io.event_loop.broker import Broker
from holdfast.io.settings.reload import Reloaded
from holdfast_federation.core.graph import FederationGraph

if TYPE_CHECKING:
    from holdfast_federation.sidecar.in_broker import BrokerFederation


class FederationView(Protocol):
    """The membership of a federation."""

    @property
    def federator(self) -> object | None:
        """The running federator, or None."""

    @property
    def is_up(self) -> bool:
        """Whether the member runs, here or at another node of the cluster."""

    @property
    def node(self) -> str:
        """The node of a cluster that runs the member, as far as this one knows; "": none."""

    def status(self) -> dict[str, object]: ...

    def mesh(self, topic: str) -> dict[str, object]: ...

    def graph(self) -> FederationGraph: ...


class FederatedProcess(Protocol):
    """A process that may be a member of a federation: a broker or a sidecar."""

    @property
    def federation(self) -> FederationView | None:
        """The membership, or None without one and on a standby."""


class ServedProcess(Protocol):
    """A process that may serve clients, a cluster and a federation."""

    broker: Broker | None
    """The broker, or None while the node stands by."""
    sharing: SharedDirectory | None
    cluster: ClusterOperations | None
    """The cluster's operations, or None while the node stands by."""
    federation: "BrokerFederation | None"
    maintenance: Maintenance | None
    config: Config
    audit: AuditLog
    siblings: list[str]
    """The nodes of the other processes of this machine, from process 1 on, at process 0."""
    restarts: int
    """The number of processes that ended before this one, with several processes."""
    is_stopping: bool
    """Whether the process is about to close its listeners."""
    explain: Callable[[], list[Setting]] | None
    """Reads all settings with their origin, in a thread. None: there is no configuration."""

    async def reload(self) -> Reloaded:
        """Reads the configuration and its files again. Raises ReloadError."""
