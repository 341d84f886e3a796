"""Reloading: other settings and files for a broker that goes on serving.

Invariants
- A reload applies completely or not at all: all files are read, and all new ports bound, before the
  first change. A file that cannot be used leaves everything as it was.
- No client that may still connect is disconnected.
- A setting that cannot change at run time keeps its value, and the report names it.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.config.listener import Listener
from holdfast.config.problem import ConfigError
from holdfast.config.schema import Config
from holdfast.hooks import Hooks
from holdfast.io.event_loop.broker import Broker
from holdfast.io.event_loop.commands.agreed import AgreedCommandRunner, agreed_users
from holdfast.io.event_loop.commands.runner import CommandRunner
from holdfast.io.event_loop.commands.thread import CommandThread
from holdfast.io.event_loop.hook_runner import HookEvents
from holdfast.io.event_loop.threads import run_in_thread
from holdfast.io.peers.authentication import Credentials, PeerAuth
from holdfast.io.settings.security_files import (
    SecurityFileError,
    SecurityFiles,
    admin_context,
    expired_list,
    load_listener,
    load_security,
    warn_if_expired,
)
from holdfast.io.sockets.listener_files import ListenerFiles
from holdfast.io.sockets.listeners import OpenListener, reserve
from holdfast.node.admission.throttle import replace_limits
from holdfast.node.config import NodeConfig
from holdfast.node.connections.reauthorize import Reauthorization
from holdfast.node.node_state import NodeState
from holdfast.node.rights import replace_rules
from holdfast.security.access.access_file import AccessData, AccessError, read_given
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.peer_secret import SecretError
from holdfast.security.tls import TlsError

logger = logging.getLogger("holdfast")

SECTIONS: Final = (
    "listeners",
    "security",
    "admin.access_file",
    "admin.open",
    "admin.certificate",
    "admin.key",
    "limits",
    "rates",
    "quotas",
    "lockout",
    "logging.level",
    "log.retention",
    "log.lake",
)
"""The settings that can change at run time, except those in `ANNOUNCED`."""
ANNOUNCED: Final = frozenset(
    f"limits.{name}"
    for name in (
        "qos_max",
        "receive_maximum",
        "retain_available",
        "shared_available",
        "topic_alias_max",
        "outgoing_topic_alias_max",
        "wildcard_available",
    )
)
"""The limits that CONNACK tells an MQTT 5 client, which relies on them while it is connected.
[MQTT-3.3.4-9]"""


READ_S: Final = 30.0
"""The most seconds that a reload waits for its files."""


class ReloadError(Exception):
    """The settings or files cannot be used. Nothing has changed. The text has the reason."""


class Reloaded(Struct, frozen=True):
    """The result of a reload: the changed settings by key, and the clients that had to leave."""

    applied: list[str]
    needs_restart: list[str]
    disconnected: int


class Preparation(Struct, frozen=True):
    """Everything that a reload needs, read and checked."""

    config: Config
    applied: list[str]
    needs_restart: list[str]
    security: SecurityFiles
    listeners: list[tuple[OpenListener, Listener, ListenerFiles]]
    """Each listener with its new settings and files."""
    admin_context: ssl.SSLContext | None = None
    """The new context of the admin port; None: plain HTTP."""
    access: AccessData = field(default_factory=AccessData)
    """The users and tokens of `admin.access_file`."""
    peers: Mapping[str, PeerAuth] = field(default_factory=dict)
    """The credentials for other nodes and members, by the section that names their files."""

    def apply_rules(self) -> None:
        """Makes the connected clients of each listener follow its new settings."""
        for listener, settings, files in self.listeners:
            listener.apply_rules(settings, files)

    def renew_peers(self, present: Mapping[str, PeerAuth | None]) -> list[str]:
        """Makes new links use the files as they are now. Returns the keys of those that differ."""
        return [
            f"{section}.{name}"
            for section, auth in present.items()
            if auth is not None
            for name in auth.renew(self.peers[section])
        ]

    def discard(self, present: list[OpenListener]) -> None:
        """Closes the listeners that were bound for this reload only."""
        for one, _, _ in self.listeners:
            if one not in present:
                one.close()


class Preparations:
    """The preparation of reloads in a thread, because a file may be large and its directory may
    hang. There is one thread at a time."""

    def __init__(self) -> None:
        self._work: asyncio.Future[Preparation] | None = None

    async def prepare(
        self, load: Callable[[], Config], present: Config, listeners: list[OpenListener]
    ) -> Preparation:
        """`prepare` in a thread. Raises `ReloadError`, also after `READ_S`; what the thread then
        still prepares is discarded."""
        if self._work is not None and not self._work.done():
            raise ReloadError("an earlier reload still waits for its files")
        self._work = work = run_in_thread(
            "reload", partial(prepare, load, present, list(listeners))
        )
        await asyncio.wait({work}, timeout=READ_S)
        if not work.done():
            work.add_done_callback(partial(_discard_late, listeners))
            raise ReloadError(f"the files could not be read within {READ_S:g} s")
        return work.result()


def _discard_late(listeners: list[OpenListener], work: "asyncio.Future[Preparation]") -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().discard(listeners)


def prepare(
    load: Callable[[], Config], present: Config, listeners: list[OpenListener]
) -> Preparation:
    """Reads the configuration and all files, and binds new ports. Raises `ReloadError`."""
    try:
        wanted = load()
    except ConfigError as error:
        raise ReloadError("; ".join(error.problems)) from error
    before, after = _flat(present), _flat(wanted)
    keys = sorted(before.keys() | after.keys())
    changed = [key for key in keys if before.get(key) != after.get(key)]
    applied = [key for key in changed if _is_reloadable(key)]
    config = _merged(present, wanted)
    bound: list[OpenListener] = []
    found: list[tuple[OpenListener, Listener, ListenerFiles]] = []
    left = list(listeners)
    try:
        security = load_security(config)
        admin = admin_context(config.admin)
        access = read_given(config.admin.access_file)
        peers = _load_peers(config)
        for settings in () if config.cluster.node_role() == "witness" else config.listeners:
            files = load_listener(settings)
            one = next((each for each in left if each.is_at(settings)), None)
            if one is None:
                one = OpenListener(settings, files, reserve(settings, config))
                bound.append(one)
            else:
                left.remove(one)
                text = expired_list(settings, files)
                if text and not expired_list(one.settings, one.files):
                    raise SecurityFileError(text)
            warn_if_expired(settings, files)
            found.append((one, settings, files))
    except (AccessError, SecurityFileError, OSError) as error:
        for one in bound:
            one.close()
        raise ReloadError(_text(error)) from error
    needs_restart = [key for key in changed if not _is_reloadable(key)]
    return Preparation(config, applied, needs_restart, security, found, admin, access, peers)


def _load_peers(config: Config) -> dict[str, PeerAuth]:
    sections: dict[str, Credentials] = {"cluster": config.cluster}
    if config.federation is not None:
        sections["federation"] = config.federation
    try:
        return {name: PeerAuth.load(files) for name, files in sections.items()}
    except (SecretError, TlsError) as error:
        raise SecurityFileError(str(error)) from error


def _text(error: Exception) -> str:
    # Errors of ports have the address in their text, and those of files in `filename`.
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return error.strerror
    return str(error)


def apply_limits(state: NodeState, config: NodeConfig) -> None:
    """Makes the node use other limits, from its next use of each on."""
    for each in fields(NodeConfig):
        # The node of a shared directory has another id than this process.
        if each.name != "node_id":
            setattr(state.config, each.name, getattr(config, each.name))
    state.pending_connects.bytes_max = config.pending_connect_bytes
    state.pending_connects.per_address_max = config.pending_connects_per_address
    state.producers.positions_max = config.producers_max
    state.producers.expiry_us = config.producer_expiry_s * 1_000_000
    replace_limits(state, config.admission)


def apply_security(broker: Broker, security: SecurityFiles) -> "asyncio.Future[int]":
    """Makes a serving node use other files. The result is the number of clients that had to leave,
    once the last of them has been disconnected."""
    broker.touch()
    security = _with_agreed_users(broker, security)
    state = broker.node.state
    broker.passwords.file = security.passwords
    security.apply_to(broker.node)
    _take_commands(broker, security)
    broker.identities.replace(security.sources)
    _observe(broker, security.hooks)
    replace_rules(state, security.acl, broker.runtime.cluster_node.replicated.all_sessions())
    disconnected: asyncio.Future[int] = broker.loop.create_future()

    def done(count: int) -> None:
        if not disconnected.done():
            disconnected.set_result(count)

    state.start_work(Reauthorization(state, security.knows, done))
    return disconnected


def _take_commands(broker: Broker, security: SecurityFiles) -> None:
    present = broker.commands
    users = security.users
    if isinstance(present, CommandRunner | AgreedCommandRunner) and users is not None:
        present.replace(users)
        return
    if present is not None:
        present.close()
    if users is None:
        broker.commands = None
    elif broker.agreement is not None:
        broker.commands = AgreedCommandRunner(
            broker, users, broker.agreement, CommandThread(broker)
        )
    else:
        broker.commands = CommandRunner(broker, users)


def _observe(broker: Broker, hooks: Sequence[Hooks]) -> None:
    control = broker.node.state.admission
    before = control.observer
    control.observer = HookEvents(hooks, broker.loop, broker.node.state.stats) if hooks else None
    if isinstance(before, HookEvents):
        before.close()


def _with_agreed_users(broker: Broker, security: SecurityFiles) -> SecurityFiles:
    """The files, with the users of the cluster in place of those of its file once there are any."""
    if broker.agreement is None:
        return security
    if security.users is None:
        if broker.agreement.current() is not None:
            text = "set security.dynamic_security_file, as on the other nodes"
            logger.warning("agreed_users_not_in_force text=%r", text)
        return security
    present = broker.commands
    try:
        if isinstance(present, AgreedCommandRunner):
            users = present.merged(security.users)
        else:
            users = agreed_users(security.users, broker.agreement)
    except DynamicSecurityError as error:
        # Those of the file may have been deleted since, so the node may not serve with them.
        broker.fail("agreed_users_not_understood", error)
        return security
    return replace(security, users=users, passwords=users.passwords, acl=users.rules)


async def apply_listeners(
    present: list[OpenListener], made: Preparation, broker: Broker | None
) -> tuple[list[OpenListener], list[str]]:
    """Opens, changes and closes listeners. Returns those that are open, and the names of those that
    the system does not let open again: they accept as before."""
    kept = [one for one, _, _ in made.listeners]
    for one in present:
        if one not in kept:
            one.close(is_removed=True)
    failed: list[str] = []
    for one, settings, files in made.listeners:
        try:
            await one.apply(settings, files, broker)
        except OSError as error:
            logger.error("listener_not_reloaded listener=%r error=%r", one.name, str(error))
            failed.append(f"listener {one.name}")
    return kept, failed


def _is_reloadable(key: str) -> bool:
    return key not in ANNOUNCED and any(
        key == section or key.startswith(f"{section}.") for section in SECTIONS
    )


def _merged(present: Config, wanted: Config) -> Config:
    """The wanted configuration, with the present values of what cannot change at run time."""
    replace = msgspec.structs.replace
    told = {key.partition(".")[2] for key in ANNOUNCED}
    return replace(
        present,
        listeners=wanted.listeners,
        security=wanted.security,
        limits=replace(wanted.limits, **{name: getattr(present.limits, name) for name in told}),
        rates=wanted.rates,
        quotas=wanted.quotas,
        lockout=wanted.lockout,
        logging=replace(present.logging, level=wanted.logging.level),
        log=replace(present.log, retention=wanted.log.retention, lake=wanted.log.lake),
    )


def _flat(config: Config) -> dict[str, object]:
    """The settings by dotted key. Lists are one value."""
    found: dict[str, object] = {}
    pending: list[tuple[str, object]] = [("", msgspec.to_builtins(config))]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            prefix = f"{key}." if key else ""
            pending += [(f"{prefix}{name}", each) for name, each in value.items()]
        else:
            found[key] = value
    return found
