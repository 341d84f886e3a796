"""JSON Web Tokens as proof of identity: the token is the password, or the user name, of CONNECT."""

import asyncio
import base64
import binascii
import json
import time
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from holdfast.security.identity.claims import ClaimRules, Claims, TokenError, identity_of
from holdfast.security.identity.identity import (
    BAD_CREDENTIALS,
    TOKEN,
    Answer,
    LoginRefusal,
    LoginRequest,
)
from holdfast.security.identity.keys import KeyStore

if TYPE_CHECKING:
    from joserfc.jwk import Key

TOKEN_BYTES_MAX: Final = 16_384
"""The most bytes of a token."""
_HEAD: Final = b"eyJ"
"""The beginning of each token: the base64 of `{"`."""


def is_token(data: bytes) -> bool:
    """Whether bytes look like a signed token, and not like a password: three parts of base64."""
    return data.startswith(_HEAD) and data.count(b".") == 2


def read_header(token: bytes) -> dict[str, str]:
    """The `alg` and, if present, the `kid` of a token that is not verified yet. Raises
    `TokenError`."""
    if len(token) > TOKEN_BYTES_MAX:
        raise TokenError(f"the token has more than {TOKEN_BYTES_MAX} bytes")
    head = token.partition(b".")[0]
    try:
        raw = base64.b64decode(head + b"=" * (-len(head) % 4), altchars=b"-_", validate=True)
        header = json.loads(raw)
    except (binascii.Error, ValueError, RecursionError):
        raise TokenError("the token's header is not base64 of JSON") from None
    algorithm = header.get("alg") if isinstance(header, dict) else None
    if not isinstance(algorithm, str):
        raise TokenError("the token's header has no 'alg'")
    kid = header.get("kid")
    if kid is None:
        return {"alg": algorithm}
    if not isinstance(kid, str):
        raise TokenError("the token's 'kid' must be a text")
    return {"alg": algorithm, "kid": kid}


def verify(token: bytes, key: "Key", algorithm: str) -> Claims:
    """The claims of a token that the key has signed with this algorithm. Raises `TokenError`.

    The algorithm is the caller's choice, and the key must be of its type. Otherwise a client could
    sign with HS256 and the text of the public key as the secret.
    """
    from joserfc import jwt
    from joserfc.errors import BadSignatureError

    try:
        return jwt.decode(token, key, algorithms=[algorithm]).claims
    except BadSignatureError:
        raise TokenError("the token's signature does not fit its key") from None
    except Exception:  # noqa: BLE001
        # The library raises its own errors, and ValueError or TypeError for odd input. All mean
        # that nothing is proved, and their texts may contain parts of the token.
        raise TokenError("the token's signature, header or claims cannot be used") from None


class TokenSource:
    """The source of identity that verifies tokens."""

    method = TOKEN
    authenticates = True
    authorises = False

    def __init__(
        self,
        keys: KeyStore,
        algorithms: Collection[str],
        rules: ClaimRules,
        *,
        in_username: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        from joserfc.errors import SecurityWarning

        self._keys = keys
        self._algorithms = frozenset(algorithms)
        self._rules = rules
        self._in_username = in_username
        self._clock = clock
        # The operator has allowed the algorithms; the library warns of some at each token.
        warnings.filterwarnings("ignore", category=SecurityWarning)
        # A signature costs 0.1 ms and more.
        self._threads = ThreadPoolExecutor(1, "token")

    async def start(self) -> None:
        self._keys.start()

    async def close(self) -> None:
        self._keys.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def authenticate(self, request: LoginRequest) -> Answer:
        """Accepts or refuses a token. Other passwords are not this source's."""
        name = request.username or ""
        token = name.encode() if self._in_username else request.password or b""
        if not is_token(token):
            return None
        try:
            header = read_header(token)
            algorithm = header["alg"]
            if algorithm not in self._algorithms:
                allowed = ", ".join(sorted(self._algorithms))
                raise TokenError(f"the token's algorithm is not one of {allowed}")
            key = await self._keys.find(header.get("kid"))
            loop = asyncio.get_running_loop()
            claims = await loop.run_in_executor(self._threads, verify, token, key, algorithm)
            return identity_of(claims, self._rules, request.client_id, self._clock())
        except TokenError as error:
            return LoginRefusal(BAD_CREDENTIALS, str(error))
