"""Gives a process its place among those that serve one data directory (`serve --processes`).

Each is a node of one cluster. Node 0 has the data directory itself, so that a directory of one
process goes on with several and back. Node k has the directory `processes/k` in it. The
configuration is the same for all of them, and `applied` makes that of one process.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.addresses import UNIX, join_address, split_address
from holdfast.config.listener import Listener
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Admin, Cluster, Config, Log, Node, ScopeRates
from holdfast.log.files.data_directory import DataDirectoryError, present_processes, read_manifest
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import MANIFEST, PROCESSES, Manifest

SECRET: Final = "secret"
"""The file of the secret that the processes share, in the directory PROCESSES."""
STOP: Final = signal.SIGUSR1
RELOAD: Final = signal.SIGUSR2
"""The signals of the supervisor. A service manager sends SIGTERM to all processes of a service, and
the second request would stop them without the waits of a stop. So they ignore it."""
IGNORED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
T = TypeVar("T", Listener, ScopeRates)

RATES: Final = ("messages_per_s", "bytes_per_s", "connects_per_s")
PROCESSES_MAX: Final = 64
EXIT_REMOVED: Final = 10
"""The exit code of a process whose node was removed from the cluster, so that its directory has
nothing that the others lack."""
EXIT_AGAIN: Final = 11
"""The exit code of a process that starts again, to set its data directory aside."""


class ProcessPlace(Struct, frozen=True):
    """The number of a process, from 0 on, among `count` of them."""

    index: int
    count: int
    sockets: str
    """The directory of the Unix sockets between the processes."""
    restarts: int = 0
    """The number of processes before this one at the same place, since the supervisor started."""
    unix: dict[str, int] = field(default_factory=dict)
    """The descriptors of the Unix sockets of listeners by path, which all processes inherit."""
    ports: tuple[int, ...] = ()
    """The ports that the system has chosen for listeners on port 0, in their order."""

    @property
    def notices(self) -> str:
        """The path of the socket at which the supervisor receives the reports of the process."""
        return f"{self.sockets}/{self.index}.notify"

    @property
    def is_surplus(self) -> bool:
        """Whether there were more processes before. This one has no clients, and gives what it
        stores to the others."""
        return self.index >= self.count

    def applied(self, config: Config) -> Config:
        """The configuration of this process.

        Limits of connections and rates of listeners are divided among the processes, so that they
        hold for all together. Other rates are those of a client, a user or an address, which may
        have one connection only.
        """
        secret = Path(config.node.data) / PROCESSES / SECRET
        own_partitions = config.log.partitions
        cluster = replace(
            config.cluster,
            peer_bind=f"{UNIX}{self.sockets}/{self.index}",
            join=[f"{UNIX}0"] if self.index else [],
            wait_for_init=self.index > 0,
            secret_file=str(secret),
            replication_factor=1,
            min_insync=1,
        )
        if own_partitions != Log().partitions:
            cluster = replace(cluster, partitions=own_partitions)
        # Node 0 has the name and the number of partitions that the data directory has.
        config = with_directory(replace(config, cluster=cluster))
        ports = iter(self.ports)
        listeners = [self._listener(each, ports) for each in config.listeners]
        if self.is_surplus:
            listeners = []
        if self.index:
            # Process 0 alone serves a path that a reload adds.
            listeners = [each for each in listeners if not each.socket or each.socket in self.unix]
            name, data = config.node.id, Path(config.node.data)
            node = replace(
                config.node,
                id=node_name(name, self.index),
                data=str(data / PROCESSES / str(self.index)),
            )
            config = replace(config, node=node, admin=self._admin(config.admin))
        return replace(
            config,
            # Not `count`: a reload has to notice that the configuration wants another number.
            server=replace(config.server, processes=count_of(config)),
            listeners=listeners,
            rates=replace(config.rates, listener=_divided(config.rates.listener, self.count)),
            limits=replace(config.limits, connections=self._share(config.limits.connections)),
        )

    def _admin(self, admin: Admin) -> Admin:
        """The port of a process besides 0, for programs that read the log at its node."""
        advertised = admin.advertise
        if advertised:
            host, port = split_address(advertised)
            advertised = join_address(host, port + self.index)
        return replace(admin, port=admin.port + self.index, advertise=advertised, console=False)

    def _listener(self, listener: Listener, ports: Iterator[int]) -> Listener:
        """The listener of this process. `ports`: those in place of 0. Raises `ConfigError`."""
        listener = replace(listener, max_connections=self._share(listener.max_connections))
        if not listener.port and not listener.socket and self.count > 1:
            port = next(ports, 0)
            if not port:
                raise ConfigError(
                    "listeners: one more is on port 0, and the processes share a port: give its"
                    " number, or restart"
                )
            listener = replace(listener, port=port)
        return _divided(listener, self.count)

    def _share(self, limit: int) -> int:
        """The share of a limit; 0: no limit. The shares of all processes are the limit, unless it
        is below their number."""
        if not limit or self.is_surplus:
            return limit
        return max(1, limit // self.count + (self.index < limit % self.count))


def _divided(rates: T, count: int) -> T:
    """The settings of a listener, or of all listeners, with the share of each rate."""
    return replace(rates, **{name: getattr(rates, name) / count for name in RATES})


def node_name(first: str, index: int) -> str:
    """The name of the node of a process, by that of node 0."""
    return f"{first}-{index}" if index else first


def index_of(first: str, node: str) -> int | None:
    """Reverses `node_name`; None for another node."""
    if node == first:
        return 0
    before, _, number = node.rpartition("-")
    return int(number) if before == first and number.isdecimal() else None


def count_of(config: Config) -> int:
    """The number of processes of a configuration."""
    wanted = config.server.processes
    if wanted != "auto":
        return wanted
    return min(PROCESSES_MAX, len(os.sched_getaffinity(0)))


def is_supervised(config: Config) -> bool:
    """Whether several processes serve the data directory, or did and are to be one."""
    return count_of(config) > 1 or bool(present_processes(Path(config.node.data)))


def with_directory(config: Config) -> Config:
    """The configuration with the name and the number of partitions that the data directory has,
    where the settings have their defaults."""
    manifest = manifest_of(Path(config.node.data))
    if manifest is None:
        return config
    changed = config
    # The nodes that share a directory have names of their own.
    if config.node.id == Node().id and not config.node.standby:
        changed = replace(changed, node=replace(config.node, id=manifest.node_id))
    partitions = manifest.partitions
    # The other number stands for nothing here, and a reload would find that it has changed.
    if not config.cluster.peer_bind and not config.cluster.join:
        if config.log.partitions == Config().log.partitions:
            changed = replace(changed, log=replace(config.log, partitions=partitions))
    elif config.cluster.partitions == Cluster().partitions:
        changed = replace(changed, cluster=replace(config.cluster, partitions=partitions))
    return changed


def manifest_of(data: Path) -> Manifest | None:
    """The manifest of a data directory; None if it has none, or one that the start will refuse."""
    if not (data / MANIFEST).exists():
        return None
    try:
        return read_manifest(OsFileSystem(data), data)
    except DataDirectoryError:
        return None
