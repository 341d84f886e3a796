"""Chooses servers, from no connection to the first CONNACK.

Sockets are raced, CONNECT is not. The servers of a round are opened one after another: the next one
as soon as one fails, or beside it after `stagger_s`. Only one of the open ones at a time is sent
CONNECT, because two CONNECTs of one client id take the session from each other if both arrive. If
its CONNACK is late and another server has accepted meanwhile, the first is aborted before the other
is sent CONNECT. So a refused server costs its refusal, one that swallows packets `stagger_s`, and
one that is stopped while its kernel accepts `connack_timeout_s`.

The driver reports the events of the attempts, carries out `actions` in order after each call, and
calls `handle_timer` when `timer` is due. `now` is monotonic seconds. There is at most one attempt
per server, so the server identifies it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from holdfast.client.errors import ClientError, ConnectionLost, ConnectionRefused, TimedOut
from holdfast.client.reconnect import Backoff, Reconnect, is_transient
from holdfast.client.servers import Server, parse_references
from holdfast.protocol.mqtt import reasons

REFERENCES_MAX: Final = 8
"""The most servers known from references only that are remembered."""
STRAY_S: Final = 300.0
"""The seconds for which a server may still act upon a CONNECT whose connection was given up: a
server that was stopped, or is far behind with its work."""
STRAYS_MAX: Final = 16
"""The most such CONNECTs that are remembered."""


@dataclass(frozen=True)
class Open:
    """The order to open the socket (with TLS and WebSocket); the driver replies with `opened` or
    `failed`."""

    server: Server


@dataclass(frozen=True)
class Start:
    """The order to send CONNECT over the open socket; the driver replies with `connected` or
    `failed`."""

    server: Server


@dataclass(frozen=True)
class Drop:
    """The order to abort the attempt, without another report of it."""

    server: Server


@dataclass(frozen=True)
class GiveUp:
    """The end of dialing without a connection; no attempt is left."""

    error: ClientError


Action: TypeAlias = Open | Start | Drop | GiveUp


class Dialer:
    """The state of all attempts. `connect_timeout_s` bounds the opening of each, and the wait for
    its CONNACK.

    Invariant: at most one open attempt has been sent CONNECT.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        policy: Reconnect,
        connect_timeout_s: float,
        random: Callable[[], float],
    ) -> None:
        self.server: Server | None = None
        """The server of the connection."""
        self._servers = list(servers)
        self._policy = self._usual_policy = policy
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(random)
        self._references: list[Server] = []
        self._first = self._servers[0]
        self._attempts: dict[Server, bool] = {}  # True: the socket is open.
        self._candidate: Server | None = None
        """The server that has been sent CONNECT."""
        self._connect_sent_at = 0.0
        self._patience_s = policy.connack_timeout_s
        self._dialing = False
        self._round: list[Server] = []
        self._round_count = 0
        self._next_open_at = 0.0
        self._next_round_at: float | None = None
        self._give_up_at: float | None = None
        self._connected_at = 0.0
        # The times until which each stray CONNECT of this client may arrive.
        self._strays: deque[float] = deque(maxlen=STRAYS_MAX)
        self._errors: dict[Server, ClientError] = {}
        self._actions: list[Action] = []

    def actions(self) -> list[Action]:
        """Removes and returns the actions so far."""
        actions = self._actions
        self._actions = []
        return actions

    def timer(self) -> float | None:
        """The time at which `handle_timer` is due, or None."""
        if not self._dialing:
            return None
        times = [self._next_round_at, self._give_up_at]
        if self._round:
            times.append(self._next_open_at)
        if self._candidate is not None and self._other_open() is not None:
            times.append(self._connect_sent_at + self._patience_s)
        return min((one for one in times if one is not None), default=None)

    # Calls of the application

    def start(self, now: float, policy: Reconnect | None = None) -> None:
        """Starts to dial with the first round at once. `policy` is for this time only."""
        self._policy = policy or self._usual_policy
        self._backoff.reset()
        self._patience_s = self._policy.connack_timeout_s
        self._errors.clear()
        self._start_dialing(now)
        self._next_round_at = now
        self._advance(now)

    def stop(self) -> None:
        """Aborts all attempts, because no connection is wanted any more."""
        self._dialing = False
        self.server = None
        for server in list(self._attempts):
            self._drop(server)

    # Calls of the driver

    def opened(self, server: Server, now: float) -> None:
        """Notes that the socket of an attempt is open."""
        self._attempts[server] = True
        self._advance(now)

    def connected(self, server: Server, now: float) -> None:
        """Notes that CONNACK has come, and aborts the other attempts."""
        del self._attempts[server]
        self._candidate = None
        self.stop()
        self.server = self._first = server
        self._connected_at = now
        self._policy = self._usual_policy
        self._patience_s = self._policy.connack_timeout_s

    def failed(self, server: Server, error: ClientError, now: float) -> None:
        """Notes that an attempt ended without a connection."""
        del self._attempts[server]
        if self._candidate == server:
            self._candidate = None
            if not isinstance(error, ConnectionRefused):
                self._note_stray(now)
        self._errors[server] = error
        if not is_transient(error):
            self._give_up(error)
            return
        self._follow(error, server)
        # The next server of this round need not wait for the stagger.
        self._next_open_at = now
        self._advance(now)

    def note_lost(self, error: ClientError, now: float) -> None:
        """Dials again, because the connection was lost."""
        server = self.server
        assert server is not None
        self.server = None
        self._errors = {server: error}
        by_ourselves = error.reason == reasons.SESSION_TAKEN_OVER and self._expects_stray(now)
        if not is_transient(error) and not by_ourselves:
            self._give_up(error)
            return
        if now - self._connected_at >= self._policy.stable_after_s:
            self._backoff.reset()
        if error.reason == reasons.KEEP_ALIVE_TIMEOUT:
            # A silent server may still accept sockets without ever replying.
            known = self._all_servers()
            self._first = known[(known.index(server) + 1) % len(known)]
        self._follow(error, server)
        self._start_dialing(now)
        self._next_round_at = now + self._backoff.next_s(self._policy)

    def handle_timer(self, now: float) -> None:
        """Does the steps that are due."""
        if not self._dialing:
            return
        if self._give_up_at is not None and now >= self._give_up_at:
            assert self._policy.give_up_after_s is not None
            self._give_up(self._summary(f"no connection in {self._policy.give_up_after_s:g} s"))
            return
        self._advance(now)

    # The rounds

    def _start_dialing(self, now: float) -> None:
        self._dialing = True
        self._round.clear()
        self._round_count = 0
        limit_s = self._policy.give_up_after_s
        self._give_up_at = None if limit_s is None else now + limit_s

    def _advance(self, now: float) -> None:
        self._send_next_connect(now)
        if self._next_round_at is not None and now >= self._next_round_at:
            self._next_round_at = None
            self._round_count += 1
            self._round = self._order()
            self._next_open_at = now
        while self._round and now >= self._next_open_at:
            server = self._round.pop(0)
            if server not in self._attempts:
                self._attempts[server] = False
                self._actions.append(Open(server))
                self._next_open_at = now + self._policy.stagger_s
        if self._round or self._next_round_at is not None:
            return
        if self._round_count == self._policy.attempts_max:
            if not self._attempts:
                self._give_up(self._summary("no server could be reached"))
        elif any(one not in self._attempts for one in self._all_servers()):
            self._next_round_at = now + self._backoff.next_s(self._policy)

    def _order(self) -> list[Server]:
        known = self._all_servers()
        start = known.index(self._first) if self._first in known else 0
        return known[start:] + known[:start]

    def _all_servers(self) -> list[Server]:
        return [*self._references, *self._servers]

    def _follow(self, error: ClientError, origin: Server) -> None:
        """Tries the servers that the error names first."""
        named = parse_references(error.server_reference, origin)
        if not self._policy.follow_references:
            named = [one for one in named if one in self._servers]
        named = [one for one in named if one != origin][:REFERENCES_MAX]
        if not named:
            return
        fresh = [one for one in named if one not in self._servers]
        kept = [one for one in self._references if one not in fresh]
        self._references = (fresh + kept)[:REFERENCES_MAX]
        self._first = named[0]
        known = self._all_servers()
        self._errors = {one: self._errors[one] for one in self._errors if one in known}

    # CONNECT

    def _send_next_connect(self, now: float) -> None:
        """Sends CONNECT to one open attempt at a time."""
        following = self._other_open()
        if following is None:
            return
        late = self._candidate
        if late is not None:
            if now < self._connect_sent_at + self._patience_s:
                return
            self._patience_s = min(2 * self._patience_s, self._connect_timeout_s)
            self._errors[late] = TimedOut("no CONNACK yet when another server was there")
            self._note_stray(now)
            self._drop(late)
        self._candidate = following
        self._connect_sent_at = now
        self._actions.append(Start(following))

    def _other_open(self) -> Server | None:
        """An open attempt without CONNECT."""
        for server, is_open in self._attempts.items():
            if is_open and server != self._candidate:
                return server
        return None

    def _note_stray(self, now: float) -> None:
        """Records a CONNECT that may still reach its server after the one that follows. Then the
        client takes over its own session, without another client's doing."""
        self._strays.append(now + STRAY_S)

    def _expects_stray(self, now: float) -> bool:
        """Whether a CONNECT of this client may have arrived late. Each takes over once, so another
        client with the same id is detected after as many takeovers as there were strays."""
        while self._strays and self._strays[0] <= now:
            self._strays.popleft()
        if not self._strays:
            return False
        self._strays.popleft()
        return True

    # Ending

    def _drop(self, server: Server) -> None:
        del self._attempts[server]
        if self._candidate == server:
            self._candidate = None
        self._actions.append(Drop(server))

    def _give_up(self, error: ClientError) -> None:
        self.stop()
        self._actions.append(GiveUp(error))

    def _summary(self, text: str) -> ClientError:
        """One error for all servers. After a single round with one server it is that server's
        own."""
        errors = self._errors
        if len(errors) == 1 and self._policy.give_up_after_s is None:
            return next(iter(errors.values()))
        told = [_with_address(server, error) for server, error in errors.items()]
        codes = {error.reason for error in errors.values()}
        summary = ConnectionLost("; ".join([text, *told]), codes.pop() if len(codes) == 1 else -1)
        for error in errors.values():
            summary.__cause__ = error.__cause__
        return summary


def _with_address(server: Server, error: ClientError) -> str:
    text = str(error)
    return text if text.startswith(server.address) else f"{server.address}: {text}"
