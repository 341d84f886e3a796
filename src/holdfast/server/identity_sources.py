"""The sources of identity that the configuration names."""

import asyncio
from pathlib import Path

from holdfast.config.schema import Security
from holdfast.config.sections.identity import Jwt
from holdfast.security.identity.claims import ClaimRules
from holdfast.security.identity.identity import IdentitySource
from holdfast.security.identity.keys import (
    KEYS_BYTES_MAX,
    KeysError,
    KeyStore,
    parse_keys,
    read_keys,
)
from holdfast.security.identity.tokens import TokenSource


def identity_sources(security: Security) -> tuple[IdentitySource, ...]:
    """The sources, which do nothing before they are started. Raises `KeysError`."""
    found: list[IdentitySource] = []
    if security.jwt.jwks:
        found.append(_token_source(security.jwt))
    return tuple(found)


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
        try:
            import httpx  # noqa: F401
        except ImportError:
            text = "a URL needs the package httpx: pip install 'holdfast[auth]'"
            raise KeysError(f"security.jwt.jwks: {text}") from None
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
