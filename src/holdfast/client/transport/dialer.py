"""Which server to try when: a client's way from no connection to the first CONNACK.

Sockets are raced, CONNECT is not. The servers of a round are opened one after another, the next
as soon as one fails and beside it after `stagger_s`; only one of the open ones at a time is sent
CONNECT, because two CONNECTs of one client id take the session from each other where both arrive.
If its CONNACK is late and another server has accepted meanwhile, the first is aborted before the
other is asked. So a refused server costs its refusal, one that swallows packets `stagger_s`, one
that is stopped while its kernel accepts `connack_timeout_s`.

The driver reports what happens to the attempts, carries out `actions` in order after each call,
and calls `handle_timer` when `timer` is due. `now` is monotonic seconds. There is at most one
attempt per server, so the server names it.
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
"""Servers known from references that are remembered beside the list."""
STRAY_S: Final = 300.0
"""How late a CONNECT may be acted upon after its connection was given up: by a server that was
stopped, or far behind with its work."""
STRAYS_MAX: Final = 16


@dataclass(frozen=True)
class Open:
    """Open the socket (with TLS and WebSocket); answer with `opened` or `failed`."""

    server: Server


@dataclass(frozen=True)
class Start:
    """Send CONNECT over the open socket; answer with `connected` or `failed`."""

    server: Server


@dataclass(frozen=True)
class Drop:
    """Abort the attempt; it is not reported any more."""

    server: Server


@dataclass(frozen=True)
class GiveUp:
    """There will be no connection; no attempt is left."""

    error: ClientError


Action: TypeAlias = Open | Start | Drop | GiveUp


class Dialer:
    """`connect_timeout_s` bounds each attempt's opening, and the patience for its CONNACK."""

    def __init__(
        self,
        servers: Sequence[Server],
        policy: Reconnect,
        connect_timeout_s: float,
        random: Callable[[], float],
    ) -> None:
        self.server: Server | None = None
        """The connected one."""
        self._servers = list(servers)
        self._policy = self._usual_policy = policy
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(random)
        self._references: list[Server] = []
        self._first = self._servers[0]
        self._attempts: dict[Server, bool] = {}  # True: the socket is open.
        self._asked: Server | None = None
        """The one that has been sent CONNECT."""
        self._asked_at = 0.0
        self._patience_s = policy.connack_timeout_s
        self._dialing = False
        self._round: list[Server] = []
        self._round_count = 0
        self._next_open_at = 0.0
        self._next_round_at: float | None = None
        self._give_up_at: float | None = None
        self._connected_at = 0.0
        # CONNECTs of ours that may still be on their way, and until when.
        self._strays: deque[float] = deque(maxlen=STRAYS_MAX)
        self._errors: dict[Server, ClientError] = {}
        self._actions: list[Action] = []

    def actions(self) -> list[Action]:
        actions = self._actions
        self._actions = []
        return actions

    def timer(self) -> float | None:
        """When `handle_timer` wants to be called, None for never."""
        if not self._dialing:
            return None
        times = [self._next_round_at, self._give_up_at]
        if self._round:
            times.append(self._next_open_at)
        if self._asked is not None and self._other_open() is not None:
            times.append(self._asked_at + self._patience_s)
        return min((one for one in times if one is not None), default=None)

    # Calls of the application

    def begin(self, now: float, policy: Reconnect | None = None) -> None:
        """A connection is wanted: the first round starts at once. `policy` is for this time."""
        self._policy = policy or self._usual_policy
        self._backoff.reset()
        self._patience_s = self._policy.connack_timeout_s
        self._errors.clear()
        self._start_dialing(now)
        self._next_round_at = now
        self._advance(now)

    def stop(self) -> None:
        """No connection is wanted any more."""
        self._dialing = False
        self.server = None
        for server in list(self._attempts):
            self._drop(server)

    # Calls of the driver

    def opened(self, server: Server, now: float) -> None:
        self._attempts[server] = True
        self._advance(now)

    def connected(self, server: Server, now: float) -> None:
        """CONNACK has come: the other attempts are aborted."""
        del self._attempts[server]
        self._asked = None
        self.stop()
        self.server = self._first = server
        self._connected_at = now
        self._policy = self._usual_policy
        self._patience_s = self._policy.connack_timeout_s

    def failed(self, server: Server, error: ClientError, now: float) -> None:
        """An attempt ended without a connection."""
        del self._attempts[server]
        if self._asked == server:
            self._asked = None
            if not isinstance(error, ConnectionRefused):
                self._note_stray(now)
        self._errors[server] = error
        if not is_transient(error):
            self._give_up(error)
            return
        self._follow(error, server)
        # Whatever is next in this round need not wait for the stagger.
        self._next_open_at = now
        self._advance(now)

    def lost(self, error: ClientError, now: float) -> None:
        """The connection is gone against our wish."""
        server = self.server
        assert server is not None
        self.server = None
        self._errors = {server: error}
        by_ourselves = error.reason == reasons.SESSION_TAKEN_OVER and self._takes_stray(now)
        if not is_transient(error) and not by_ourselves:
            self._give_up(error)
            return
        if now - self._connected_at >= self._policy.stable_after_s:
            self._backoff.reset()
        if error.reason == reasons.KEEP_ALIVE_TIMEOUT:
            # Silent: it may still accept sockets without ever answering.
            known = self._known()
            self._first = known[(known.index(server) + 1) % len(known)]
        self._follow(error, server)
        self._start_dialing(now)
        self._next_round_at = now + self._backoff.next_s(self._policy)

    def handle_timer(self, now: float) -> None:
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
        self._ask_next(now)
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
        elif any(one not in self._attempts for one in self._known()):
            self._next_round_at = now + self._backoff.next_s(self._policy)

    def _order(self) -> list[Server]:
        known = self._known()
        start = known.index(self._first) if self._first in known else 0
        return known[start:] + known[:start]

    def _known(self) -> list[Server]:
        return [*self._references, *self._servers]

    def _follow(self, error: ClientError, origin: Server) -> None:
        """The servers it names are tried first."""
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
        known = self._known()
        self._errors = {one: self._errors[one] for one in self._errors if one in known}

    # CONNECT

    def _ask_next(self, now: float) -> None:
        """One open attempt at a time is sent CONNECT."""
        following = self._other_open()
        if following is None:
            return
        late = self._asked
        if late is not None:
            if now < self._asked_at + self._patience_s:
                return
            self._patience_s = min(2 * self._patience_s, self._connect_timeout_s)
            self._errors[late] = TimedOut("no CONNACK yet when another server was there")
            self._note_stray(now)
            self._drop(late)
        self._asked = following
        self._asked_at = now
        self._actions.append(Start(following))

    def _other_open(self) -> Server | None:
        """An open attempt that has not been asked."""
        for server, is_open in self._attempts.items():
            if is_open and server != self._asked:
                return server
        return None

    def _note_stray(self, now: float) -> None:
        """A CONNECT of ours is out that may still reach its server, after the one that follows:
        then our own session is taken over by us, which is no other client's doing."""
        self._strays.append(now + STRAY_S)

    def _takes_stray(self, now: float) -> bool:
        """Whether a CONNECT of ours may have arrived late. Each takes over once, so another client
        with our id is found out after as many turns as there were."""
        while self._strays and self._strays[0] <= now:
            self._strays.popleft()
        if not self._strays:
            return False
        self._strays.popleft()
        return True

    # Ending

    def _drop(self, server: Server) -> None:
        del self._attempts[server]
        if self._asked == server:
            self._asked = None
        self._actions.append(Drop(server))

    def _give_up(self, error: ClientError) -> None:
        self.stop()
        self._actions.append(GiveUp(error))

    def _summary(self, text: str) -> ClientError:
        """One error for all servers; the only one's own after a single round."""
        errors = self._errors
        if len(errors) == 1 and self._policy.give_up_after_s is None:
            return next(iter(errors.values()))
        told = [_told(server, error) for server, error in errors.items()]
        codes = {error.reason for error in errors.values()}
        summary = ConnectionLost("; ".join([text, *told]), codes.pop() if len(codes) == 1 else -1)
        for error in errors.values():
            summary.__cause__ = error.__cause__
        return summary


def _told(server: Server, error: ClientError) -> str:
    text = str(error)
    return text if text.startswith(server.address) else f"{server.address}: {text}"
