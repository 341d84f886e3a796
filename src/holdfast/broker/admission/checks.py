"""The checks of a CONNECT: bans, rates of CONNECTs, sessions of a user, and the count of failures.

Without a configured limit and without a ban a CONNECT costs three looks at `NodeState.admission`.
"""

from holdfast.broker.admission.bans import Ban
from holdfast.broker.admission.limits import (
    ADDRESS,
    CLIENT,
    LISTENER,
    USER,
)
from holdfast.broker.admission.meters import bounded_name, names_of
from holdfast.broker.connections.close import close_connection, refuse
from holdfast.broker.connections.pending_connects import address_of
from holdfast.broker.session.connection import Connection
from holdfast.broker.session.session import Session
from holdfast.broker.state import NodeState, Work
from holdfast.protocol.mqtt import reasons


def may_connect(
    state: NodeState, connection: Connection, client_id: str, username: str | None
) -> bool:
    """Whether a CONNECT is within the rates and not banned; if not, it is refused. `username`: the
    name in CONNECT, proved or not, because a lock-out must spare the check of the password."""
    admission = state.admission
    if not len(admission.bans) and not admission.counts_connects:
        return True
    names = names_of(client_id, username, address_of(connection.remote), connection.listener.name)
    if is_banned(state, connection, names):
        return False
    now = state.now
    for scope in (LISTENER, ADDRESS, CLIENT, USER):
        if not admission.meters.has_allowance(scope, names[scope], now):
            state.stats.refused_connect_rate += 1
            text = f"too many CONNECTs a second of this {scope}: try again later"
            refuse(state, connection, reasons.CONNECTION_RATE_EXCEEDED, text)
            return False
    return True


def is_banned(state: NodeState, connection: Connection, names: dict[str, str]) -> bool:
    """Whether one of the names is banned; the client is refused then."""
    bans = state.admission.bans
    for scope in (ADDRESS, CLIENT, USER):
        ban = bans.find(scope, names[scope], state.now)
        if ban is not None:
            state.stats.refused_banned += 1
            left_s = max(1, round(ban.until - state.now))
            text = f"this {scope} is banned for {left_s} s: {ban.reason}"
            refuse(state, connection, reasons.BANNED, text)
            return True
    return False


def is_address_banned(state: NodeState, remote: str) -> bool:
    """Whether connections of the address are closed before their first byte."""
    bans = state.admission.bans
    return len(bans) > 0 and bans.find(ADDRESS, address_of(remote), state.now) is not None


def may_open_as(state: NodeState, connection: Connection, client_id: str) -> bool:
    """Whether the proved user of a connection may connect with a client id; if not, the client is
    refused. CONNECT need not have contained the name: a certificate or a token may."""
    username = connection.username
    admission = state.admission
    if not username:
        return True
    if username in admission.disabled_users:
        refuse(state, connection, reasons.NOT_AUTHORIZED, "the user is disabled")
        return False
    if admission.client_ids.get(username, client_id) != client_id:
        text = "the user may not use this client id"
        refuse(state, connection, reasons.CLIENT_IDENTIFIER_NOT_VALID, text)
        return False
    if not len(admission.bans):
        return True
    names = names_of(connection.client_id, username, "", "")
    return not is_banned(state, connection, names)


def has_session_room(state: NodeState, username: str | None) -> bool:
    """Whether the user may open one more session at this node."""
    users = state.admission.users
    return users is None or not username or users.has_room(username)


def note_failure(state: NodeState, connection: Connection, username: str = "") -> None:
    """Count a failed authentication, and lock the client's names out after too many. `username`:
    the name that was not proved; "": that of CONNECT."""
    state.stats.authentications_failed += 1
    limits = state.admission.limits
    if limits.lockout_failures <= 0:
        return
    client_id = connection.client_id
    connect = connection.connect
    if connect is not None:
        client_id = connect.client_id
        username = username or connect.username or ""
    names = names_of(client_id, username, address_of(connection.remote), connection.listener.name)
    now = state.now
    failures = state.admission.failures
    for scope in limits.lockout_scopes:
        name = names[scope]
        if not name:
            continue
        if failures.add(scope, name, limits.lockout_window_s, now) >= limits.lockout_failures:
            failures.forget(scope, name)
            text = f"{limits.lockout_failures} failed authentications"
            ban = Ban(scope, name, now + limits.lockout_s, text, True)
            state.admission.bans.add(ban)
            state.stats.lockouts += 1
            _note_ban(state, "locked_out", ban)


def ban(state: NodeState, scope: str, name: str, duration_s: float, reason: str) -> None:
    """Ban a client, user or address for a time, and close its connections (a job)."""
    added = Ban(scope, bounded_name(name), state.now + duration_s, reason)
    state.admission.bans.add(added)
    _note_ban(state, "banned", added)
    state.start_work(Expulsion(list(state.sessions.values()), added))


def lift_ban(state: NodeState, scope: str, name: str) -> bool:
    """End the bans of a name. False: there was none."""
    is_lifted = state.admission.bans.lift(scope, bounded_name(name))
    if is_lifted:
        state.note("info", "ban_lifted", {"scope": scope, "name": name})
    return is_lifted


def present_bans(state: NodeState) -> list[Ban]:
    """The bans and lock-outs in force, those that end first first."""
    return state.admission.bans.present(state.now)


def _note_ban(state: NodeState, event: str, added: Ban) -> None:
    duration_s = round(added.until - state.now)
    fields: dict[str, object] = {
        "scope": added.scope,
        "name": added.name,
        "duration_s": duration_s,
        "reason": added.reason,
    }
    state.note("warning", event, fields)


class Expulsion(Work):
    """The job that closes the connections of a banned name. A step is one session."""

    def __init__(self, sessions: list[Session], added: Ban) -> None:
        super().__init__()
        self.sessions = sessions
        self.ban = added
        self.next = 0

    def step(self, state: NodeState, steps: int) -> int:
        start = self.next
        end = min(len(self.sessions), start + steps)
        added = self.ban
        for index in range(start, end):
            connection = self.sessions[index].connection
            if connection is None or connection.is_internal:
                continue
            address = address_of(connection.remote) if added.scope == ADDRESS else ""
            names = names_of(connection.client_id, connection.username, address, "")
            if names[added.scope] == added.name:
                text = f"this {added.scope} is banned: {added.reason}"
                # DISCONNECT has no reason for bans. [MQTT-3.14.2-1]
                close_connection(state, connection, reasons.ADMINISTRATIVE_ACTION, text)
        self.next = end
        self.has_more = end < len(self.sessions)
        if not self.has_more:
            self.sessions = []
        return end - start
