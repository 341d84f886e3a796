"""Fetches, caches and rotates the keys that sign tokens: a JSON Web Key Set.

Invariants
- A token's signature is checked by the key that its header names (`kid`). A key that is unknown is
  fetched at most once in `COOLDOWN_S`, however many tokens name unknown keys: otherwise a stranger
  could make the broker send a request per CONNECT.
- A fetch that fails leaves the keys in force, for at most `STALE_S`. After that all tokens are
  refused, because a key that was withdrawn would count for ever.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.security.identity.claims import TokenError

if TYPE_CHECKING:
    from joserfc.jwk import Key

logger = logging.getLogger("holdfast")

COOLDOWN_S: Final = 10.0
"""The least seconds between two fetches because of unknown keys."""
STALE_S: Final = 86_400.0
"""The seconds for which keys count that could not be fetched again."""
KEYS_BYTES_MAX: Final = 1 << 20
"""The most bytes of a key set."""
KEYS_MAX: Final = 1000
NO_JOSERFC: Final = "tokens need the package joserfc: pip install 'holdfast[auth]'"

Fetch = Callable[[], Awaitable[bytes]]


class KeysError(ValueError):
    """A key set that cannot be used. The text has the place and the reason."""


def parse_keys(data: bytes, name: str) -> "list[Key]":
    """The keys of a JSON Web Key Set. Keys of unknown types are left out, as RFC 7517 says, but not
    all of them. Raises `KeysError`."""
    try:
        from joserfc.errors import JoseError
        from joserfc.jwk import import_key
    except ImportError:
        raise KeysError(NO_JOSERFC) from None
    if len(data) > KEYS_BYTES_MAX:
        raise KeysError(f"{name}: more than {KEYS_BYTES_MAX} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise KeysError(f"{name}: not JSON") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > KEYS_MAX:
        raise KeysError(f'{name}: must be {{"keys": [...]}} with at most {KEYS_MAX} keys')
    found: list[Key] = []
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
            continue
        try:
            found.append(import_key(entry))
        except (JoseError, ValueError, TypeError, KeyError, AttributeError):
            continue
    if not found:
        raise KeysError(f"{name}: contains no key that signs (type oct, RSA, EC or OKP)")
    return found


class KeyStore:
    """The keys of one source."""

    def __init__(self, name: str, fetch: Fetch, refresh_s: float) -> None:
        """`name`: the file or URL, for errors. `fetch` gets its present bytes, or raises."""
        self.name = name
        self._fetch = fetch
        self._refresh_s = refresh_s
        self._keys: list[Key] = []
        self._fetched_at = float("-inf")
        self._tried_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._has_failed = False

    def set_keys(self, keys: "list[Key]") -> None:
        """Uses these keys, which were just read."""
        self._keys = keys
        self._fetched_at = self._tried_at = time.monotonic()

    def start(self) -> None:
        """Fetches the keys now, if there are none, and again every `refresh_s`."""
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    def close(self) -> None:
        """Stops fetching."""
        for task in (self._refreshing, self._fetching):
            if task is not None:
                task.cancel()

    async def find(self, kid: str | None) -> "Key":
        """The key of a token's header. Raises `TokenError`."""
        key = self._look_up(kid)
        if key is None and time.monotonic() - self._tried_at >= COOLDOWN_S:
            await self._fetch_once()
            key = self._look_up(kid)
        if key is not None:
            return key
        if not self._keys or time.monotonic() - self._fetched_at > STALE_S:
            raise TokenError("there are no keys to check tokens with")
        named = "an unknown key ('kid')" if kid is not None else "no key ('kid')"
        raise TokenError(f"the token names {named}")

    def _look_up(self, kid: str | None) -> "Key | None":
        if time.monotonic() - self._fetched_at > STALE_S:
            return None
        if kid is None:
            return self._keys[0] if len(self._keys) == 1 else None
        return next((key for key in self._keys if key.kid == kid), None)

    async def _refresh(self) -> None:
        while True:
            if not self._keys or time.monotonic() - self._fetched_at >= self._refresh_s:
                await self._fetch_once()
            await asyncio.sleep(self._refresh_s if self._keys else min(COOLDOWN_S, self._refresh_s))

    async def _fetch_once(self) -> None:
        """Fetches the keys; all callers share one fetch."""
        task = self._fetching
        if task is None or task.done():
            task = self._fetching = asyncio.get_running_loop().create_task(self._fetch_now())
        await asyncio.shield(task)

    async def _fetch_now(self) -> None:
        self._tried_at = time.monotonic()
        try:
            data = await self._fetch()
            keys = await asyncio.to_thread(parse_keys, data, self.name)
        except Exception as error:  # noqa: BLE001
            # Whatever fails in a library: the keys of before stay in force.
            if not self._has_failed:
                logger.error("keys_not_fetched source=%r error=%r", self.name, str(error))
            self._has_failed = True
            return
        if self._has_failed:
            logger.info("keys_fetched source=%r keys=%d", self.name, len(keys))
        self._has_failed = False
        self.set_keys(keys)


def read_keys(path: Path) -> bytes:
    """The bytes of a key file. Raises `KeysError`."""
    try:
        with path.open("rb") as file:
            return file.read(KEYS_BYTES_MAX + 1)
    except OSError as error:
        raise KeysError(f"{path}: cannot read the keys: {error.strerror}") from None
