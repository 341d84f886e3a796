"""Makes the sources of identity that the configuration names."""

import asyncio
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from holdfast.config.identity import HookSettings, HttpCheck, Jwt
from holdfast.config.schema import Security
from holdfast.hooks import Hooks
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
