"""Loads the files of passwords, rights and certificates that the settings name."""

import asyncio
import logging
import ssl
import stat
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Final

from msgspec import Struct

from holdfast.config.check_identity import has_sources
from holdfast.config.identity import HookSettings, HttpCheck, Jwt
from holdfast.config.listener import Listener
from holdfast.config.schema import Admin, Config, Security
from holdfast.hooks import Hooks
from holdfast.io.event_loop.hook_runner import HookSource
from holdfast.io.sockets.listener_files import ListenerFiles
from holdfast.node.node import Node
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.security.acl import AclError, AclFile, RuleSource
from holdfast.security.certificate_times import lists_valid_until
from holdfast.security.dynamic.document import DynamicSecurityError
from holdfast.security.dynamic.file import DynamicSecurityFile
from holdfast.security.dynamic.users import DynamicUsers
from holdfast.security.enhanced_authentication import scram_factories
from holdfast.security.identity.claims import ClaimRules
from holdfast.security.identity.http_check import HttpSource
from holdfast.security.identity.http_service import HttpService
from holdfast.security.identity.identity import IdentitySource
from holdfast.security.identity.keys import (
    KEYS_BYTES_MAX,
    KeysError,
    KeyStore,
    parse_keys,
    read_keys,
)
from holdfast.security.identity.tokens import TokenSource
from holdfast.security.identity.topic_check import TopicCheck
from holdfast.security.passwords import PasswordError, PasswordFile
from holdfast.security.psk import load_keys, psk_context
from holdfast.security.scram_file import ScramError, ScramFile
from holdfast.security.tls import TlsError, server_context

HOOK_GROUP: Final = "holdfast.hooks"
"""The group of entry points."""


class SourceError(ValueError):
    """A source of identity that cannot be used. The text has the key or file, and the reason."""


def identity_sources(security: Security) -> tuple[IdentitySource, ...]:
    """The sources, which do nothing before they are started. Raises `SourceError`."""
    found: list[IdentitySource] = []
    if security.jwt.jwks:
        try:
            found.append(_token_source(security.jwt))
        except KeysError as error:
            raise SourceError(str(error)) from error
    if security.http.url or security.http.topic_url:
        found.append(_http_source(security.http))
    return tuple(found)


def load_hooks(settings: HookSettings) -> list[Hooks]:
    """The hooks that the settings name, each made once. Raises `SourceError`."""
    if not settings.enabled:
        return []  # the search reads the metadata of each installed package
    from importlib.metadata import entry_points

    known = {entry.name: entry for entry in entry_points(group=HOOK_GROUP)}
    found: list[Hooks] = []
    for name in settings.enabled:
        entry = known.get(name)
        if entry is None:
            names = ", ".join(sorted(known)) or "none"
            raise SourceError(
                f"hooks.enabled: no installed package has the entry point {name!r} of the group"
                f" {HOOK_GROUP!r}; there are: {names}"
            )
        try:
            hook = entry.load()()
        except Exception as error:
            # Code of the operator may raise anything.
            raise SourceError(f"hooks.enabled: {name!r} cannot be made: {error}") from error
        if not isinstance(hook, Hooks):
            raise SourceError(f"hooks.enabled: {name!r} is not derived from holdfast.hooks.Hooks")
        found.append(hook)
    return found


def _http_source(settings: HttpCheck) -> HttpSource:
    _require_httpx("security.http.url" if settings.url else "security.http.topic_url")
    headers = {"Content-Type": "application/json"}
    if settings.authorization_file:
        headers["Authorization"] = _first_line(Path(settings.authorization_file))
    service = HttpService(headers, settings.timeout_s, settings.connections)
    topics: TopicCheck | None = None
    if settings.topic_url:
        topics = TopicCheck(settings.topic_url, service, settings.topic_remember_s)
    return HttpSource(settings.url, service, remember_s=settings.remember_s, topics=topics)


def _first_line(path: Path) -> str:
    try:
        line = path.read_text(encoding="ascii").partition("\n")[0].strip()
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not ASCII at byte {error.start}") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot read the file: {error.strerror}") from None
    if not line or not line.isprintable():
        raise SourceError(f"{path}: the first line must be the value of the header Authorization")
    return line


def _require_httpx(key: str) -> None:
    try:
        import httpx  # noqa: F401
    except ImportError:
        text = "a URL needs the package httpx: pip install 'holdfast[auth]'"
        raise SourceError(f"{key}: {text}") from None


def _token_source(jwt: Jwt) -> TokenSource:
    rules = ClaimRules(
        issuer=jwt.issuer,
        audience=jwt.audience,
        leeway_s=jwt.leeway_s,
        username=jwt.username_claim,
        publish=jwt.publish_claim,
        subscribe=jwt.subscribe_claim,
    )
    in_username = jwt.token_in == "username"
    return TokenSource(_key_store(jwt), jwt.algorithms, rules, in_username=in_username)


def _key_store(jwt: Jwt) -> KeyStore:
    if jwt.jwks.startswith(("https://", "http://")):
        _require_httpx("security.jwt.jwks")
        return KeyStore(jwt.jwks, lambda: _get(jwt.jwks, jwt.timeout_s), jwt.refresh_s)
    path = Path(jwt.jwks)
    keys = KeyStore(jwt.jwks, lambda: asyncio.to_thread(read_keys, path), jwt.refresh_s)
    keys.set_keys(parse_keys(read_keys(path), jwt.jwks))
    return keys


async def _get(url: str, timeout_s: float) -> bytes:
    """The body of a URL, in at most `timeout_s` and `KEYS_BYTES_MAX`. Raises errors of httpx,
    `TimeoutError` and `KeysError`."""
    import httpx

    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(timeout=timeout_s, follow_redirects=False) as client,
        client.stream("GET", url) as response,
    ):
        if response.status_code != 200:
            raise KeysError(f"{url}: status {response.status_code}")
        data = bytearray()
        async for part in response.aiter_bytes():
            data += part
            if len(data) > KEYS_BYTES_MAX:
                raise KeysError(f"{url}: more than {KEYS_BYTES_MAX} bytes")
        return bytes(data)


logger = logging.getLogger("holdfast")

ALPN: Final = {"tcp": ["mqtt"], "websocket": ["http/1.1"]}
"""The application protocols of TLS, by transport, by IANA's registry."""


class SecurityFileError(Exception):
    """A file that cannot be used. The text has the file, the line and the remedy."""


class SecurityFiles(Struct, frozen=True):
    """The loaded files of passwords, access rules and SCRAM credentials."""

    passwords: PasswordFile | None = None
    acl: RuleSource | None = None
    scram: ScramFile | None = None
    sources: tuple[IdentitySource, ...] = ()
    """The sources of identity, which are asked before the files."""
    hooks: tuple[Hooks, ...] = ()
    users: DynamicUsers | None = None
    """The users that clients change at run time. `passwords` and `acl` include them."""

    def knows(self, username: str, listener: ListenerRules) -> bool:
        """Whether a user has a password or SCRAM credentials at a listener."""
        own = listener.passwords
        passwords = own if isinstance(own, PasswordFile) else self.passwords
        return any(username in users for users in (passwords, self.scram) if users is not None)

    def apply_to(self, node: Node) -> None:
        """Makes the node authenticate clients by these files."""
        state = node.state
        state.admission.asks_sources = any(each.authenticates for each in self.sources)
        state.admission.asks_rights = any(each.authorises for each in self.sources)
        state.admission.checks_passwords = self.passwords is not None
        users = self.users
        state.admission.takes_commands = users is not None
        state.admission.disabled_users = frozenset() if users is None else users.disabled
        state.admission.client_ids = {} if users is None else users.client_ids
        state.admission.authenticators = (
            {} if self.scram is None else dict(scram_factories(self.scram))
        )


def authenticates_users(config: Config) -> bool:
    """Returns whether a client can prove a user name to this broker on any listener."""
    security = config.security
    files = (security.password_file, security.scram_file, security.dynamic_security_file)
    return (
        any(files)
        or has_sources(security)
        or any(
            listener.password_file
            or ((listener.client_ca or listener.psk_file) and listener.certificate_user != "none")
            for listener in config.listeners
        )
    )


def load_security(config: Config) -> SecurityFiles:
    """Loads the files that `config.security` names. Raises `SecurityFileError`."""
    security = config.security
    try:
        passwords = PasswordFile.load(security.password_file) if security.password_file else None
        acl = AclFile.load(security.acl_file) if security.acl_file else None
        scram = ScramFile.load(security.scram_file) if security.scram_file else None
        users = _dynamic_users(config, passwords, acl)
        sources = identity_sources(security)
        hooks = tuple(load_hooks(config.hooks))
        if hooks:
            sources = (*sources, HookSource(hooks, config.hooks.timeout_s))
    except (
        PasswordError,
        AclError,
        ScramError,
        DynamicSecurityError,
        SourceError,
        OSError,
    ) as error:
        raise SecurityFileError(str(error)) from error
    if acl is not None and acl.names_users() and not authenticates_users(config):
        logger.warning(
            "unproved_users acl_file=%r text='clients cannot prove user names, so the rules of"
            " users apply to none: set password_file, scram_file or client_ca'",
            security.acl_file,
        )
    if users is None:
        return SecurityFiles(passwords, acl, scram, sources, hooks)
    return SecurityFiles(users.passwords, users.rules, scram, sources, hooks, users)


def readable_by_everyone(config: Config) -> list[str]:
    """Returns the files with secrets that every user of the machine may read, each once. Blocks."""
    security = config.security
    named = [security.password_file, security.scram_file, security.dynamic_security_file]
    for each in config.listeners:
        named += [each.password_file, each.psk_file]
    paths = [Path(name) for name in dict.fromkeys(named) if name]
    return [str(path) for path in paths if path.exists() and path.stat().st_mode & stat.S_IROTH]


def _dynamic_users(
    config: Config, passwords: PasswordFile | None, acl: AclFile | None
) -> DynamicUsers | None:
    path = config.security.dynamic_security_file
    if not path:
        return None
    # In a cluster the metadata has the changes, and the file stays as it is.
    file = DynamicSecurityFile.load(Path(path), is_replaced=not config.cluster.peer_bind)
    return DynamicUsers.of(file, passwords, acl)


def load_listener(listener: Listener) -> ListenerFiles:
    """Loads the files that a listener names. Raises `SecurityFileError`."""
    try:
        context: ssl.SSLContext | None = None
        identities: frozenset[str] | None = None
        if listener.psk_file:
            keys = load_keys(Path(listener.psk_file))
            minimum = listener.tls_minimum
            context = psk_context(keys, listener.psk_hint, listener.tls_ciphers, minimum=minimum)
            identities = frozenset(keys)
        elif listener.certificate:
            context = _tls_context(listener)
        acl = AclFile.load(listener.acl_file) if listener.acl_file else None
        passwords, until = _passwords(listener.password_file), _revoked_until(listener.crl)
        return ListenerFiles(context, identities, passwords, acl, until)
    except (TlsError, PasswordError, AclError, OSError) as error:
        raise SecurityFileError(str(error)) from error


def load_listeners(listeners: Sequence[Listener]) -> list[ListenerFiles]:
    """Loads the files of all listeners for a start, with a warning for each list that has ended.
    Raises `SecurityFileError`."""
    files = [load_listener(listener) for listener in listeners]
    for listener, one in zip(listeners, files, strict=True):
        warn_if_expired(listener, one)
    return files


def _revoked_until(crl: str) -> float:
    if not crl:
        return inf
    try:
        return lists_valid_until(Path(crl).read_bytes())
    except ValueError:
        # OpenSSL has read the lists, and decides about them.
        return inf


def expired_list(listener: Listener, files: ListenerFiles) -> str:
    """The problem of a revocation list that has ended, or ""."""
    if files.revoked_until > time.time():
        return ""
    ended = datetime.fromtimestamp(files.revoked_until, UTC).isoformat()
    return f"{listener.crl}: a revocation list ended at {ended}: no client of its CA can connect"


def warn_if_expired(listener: Listener, files: ListenerFiles) -> None:
    """Logs a warning if a revocation list has ended."""
    if text := expired_list(listener, files):
        logger.warning("revocation_list_expired listener=%r error=%r", listener.name, text)


def _passwords(path: str) -> PasswordFile | None:
    if not path:
        return None
    return PasswordFile.load(path)


def _tls_context(listener: Listener) -> ssl.SSLContext:
    return server_context(
        Path(listener.certificate),
        Path(listener.key),
        Path(listener.client_ca) if listener.client_ca else None,
        listener.require_certificate,
        listener.tls_ciphers,
        minimum=listener.tls_minimum,
        crl=Path(listener.crl) if listener.crl else None,
        alpn=ALPN[listener.transport],
    )


def admin_context(admin: Admin) -> ssl.SSLContext | None:
    """The context of the admin port, or None without TLS. Raises `SecurityFileError`."""
    if not admin.certificate or not admin.enabled:
        return None
    try:
        return server_context(Path(admin.certificate), Path(admin.key))
    except TlsError as error:
        raise SecurityFileError(str(error)) from error
