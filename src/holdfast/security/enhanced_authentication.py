"""Enhanced authentication of MQTT 5 (section 4.12): the extension point and SCRAM.

The node has a Factory per method name. Each connection, and each re-authentication, opens an
Authenticator of its own. The node transports its data in CONNECT, AUTH and CONNACK and never
interprets it. An Authenticator replies with a step and raises no error, whatever the client sent.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec import Struct

from holdfast.security.scram import ScramServer, nonce
from holdfast.security.scram_file import METHOD, ScramCredentials, ScramError, ScramFile


class Continue(Struct, frozen=True):
    """The step to send AUTH with reason 0x18 (continue) and this data, and to wait."""

    data: bytes


class Success(Struct, frozen=True):
    """The step that accepts the client as `username`; `data` goes with CONNACK or AUTH."""

    data: bytes
    username: str


class Failure(Struct, frozen=True):
    """The step that refuses with 0x87 (not authorised). `reason_text` may go to the log and to the
    client. `username`: the name that was not proved, if it is known."""

    reason_text: str
    username: str = ""


Step = Continue | Success | Failure


class Authenticator(Protocol):
    """One exchange. After Success or Failure it is not called again."""

    method: str

    def start(self, client_id: str, data: bytes | None) -> Step:
        """The first step. `data` is that of CONNECT (or of the AUTH that re-authenticates), or
        None."""

    def step(self, data: bytes | None) -> Step:
        """The step after the client's next AUTH, which has this data."""


Factory = Callable[[], Authenticator]


def scram_factories(file: ScramFile) -> dict[str, Factory]:
    """The Factory of each method of the file."""
    return {
        method: partial(ScramAuthenticator, partial(file.lookup, method=method), method=method)
        for method in file.methods
    }


class ScramAuthenticator:
    """SCRAM in the exchange of MQTT 5 section 4.12: client-first in CONNECT, server-first
    and client-final in AUTH, server-final in CONNACK."""

    def __init__(
        self,
        lookup: Callable[[str], ScramCredentials],
        nonce_source: Callable[[], str] = nonce,
        method: str = METHOD,
    ) -> None:
        self.method = method
        self._server = ScramServer(lookup, nonce_source)
        self._is_started = False

    def start(self, client_id: str, data: bytes | None) -> Step:
        if not data:
            # The client lets the server begin; client-first comes in AUTH.
            return Continue(b"")
        return self.step(data)

    def step(self, data: bytes | None) -> Step:
        try:
            if not self._is_started:
                self._is_started = True
                return Continue(self._server.start(data or b""))
            return Success(self._server.finish(data or b""), self._server.username)
        except ScramError as error:
            return Failure(str(error), self._server.username)
