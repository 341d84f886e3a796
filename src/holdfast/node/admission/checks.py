"""Checks a CONNECT: bans, rates of CONNECTs, sessions of a user, and the count of failures.

Without a configured limit, a ban or a lock-out a CONNECT costs four looks at `NodeState`.
"""

from holdfast.node.admission.bans import Ban
from holdfast.node.admission.limits import ADDRESS, CLIENT, LISTENER, USER
from holdfast.node.admission.lockouts import LockedName
from holdfast.node.admission.meters import names_of
from holdfast.node.connections.pending_connects import address_of
from holdfast.node.node_state import NodeState
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import Connection
from holdfast.protocol.mqtt import reasons


def connect_refusal(
    state: NodeState, connection: Connection, client_id: str, username: str | None
) -> Rejection | None:
    """The reason to refuse a CONNECT that exceeds a rate or is banned. `username`: the name in
    CONNECT, proved or not, because a lock-out must spare the check of the password.

    Nothing is charged unless all scopes have an allowance: an address above its own rate must not
    use up that of its listener. Names are charged after the proof (`entry_refusal`): strangers must
    not use up the rate of a user.
    """
    admission = state.admission
    banned = _ban_refusal(state, connection, client_id, username)
    if banned is not None or not admission.counts_connects:
        return banned
    names = names_of(client_id, username, address_of(connection.remote), connection.listener.name)
    over = _rate_refusal(state, names, (CLIENT, USER, ADDRESS, LISTENER))
    if over is None:
        for scope in (ADDRESS, LISTENER):
            admission.meters.charge_connect(scope, names[scope], state.now)
    return over


def entry_refusal(state: NodeState, connection: Connection) -> Rejection | None:
    """The reason to refuse an authenticated client whose names exceed their rates of CONNECTs,
    which are charged now."""
    packet = connection.connect
    admission = state.admission
    if not admission.counts_connects or packet is None:
        return None
    names = names_of(packet.client_id, connection.username, "", "")
    over = _rate_refusal(state, names, (CLIENT, USER))
    if over is None:
        for scope in (CLIENT, USER):
            admission.meters.charge_connect(scope, names[scope], state.now)
    return over


def _rate_refusal(
    state: NodeState, names: dict[str, str], scopes: tuple[str, ...]
) -> Rejection | None:
    for scope in scopes:
        if not state.admission.meters.has_allowance(scope, names[scope], state.now):
            state.stats.refused_connect_rate += 1
            text = f"too many CONNECTs a second of this {scope}: try again later"
            return Rejection(text, reasons.CONNECTION_RATE_EXCEEDED)
    return None


def _ban_refusal(
    state: NodeState, connection: Connection, client_id: str, username: str | None
) -> Rejection | None:
    """The reason to refuse a client of which a name is banned or locked out."""
    if not len(state.bans) and not len(state.admission.lockouts):
        return None
    if connection.is_internal:
        return None
    ban = find_ban(state, connection, client_id, username)
    if ban is not None:
        text = ban.text(state.wall_us)
    else:
        lockout = _find_lockout(state, connection, client_id, username)
        if lockout is None:
            return None
        text = lockout.text(state.now)
    state.stats.refused_banned += 1
    return Rejection(text, reasons.BANNED)


def find_ban(
    state: NodeState, connection: Connection, client_id: str, username: str | None
) -> Ban | None:
    """The ban of the client's address, client id or user name, or None."""
    names = names_of(client_id, username, address_of(connection.remote), "")
    for scope in (ADDRESS, CLIENT, USER):
        ban = state.bans.find(scope, names[scope], state.wall_us)
        if ban is not None:
            return ban
    return None


def _find_lockout(
    state: NodeState, connection: Connection, client_id: str, username: str | None
) -> LockedName | None:
    names = names_of(client_id, username, address_of(connection.remote), "")
    for scope in (ADDRESS, CLIENT, USER):
        lockout = state.admission.lockouts.find(scope, names[scope], state.now)
        if lockout is not None:
            return lockout
    return None


def is_address_banned(state: NodeState, remote: str) -> bool:
    """Whether connections of the address are closed before their first byte."""
    bans, lockouts = state.bans, state.admission.lockouts
    if not len(bans) and not len(lockouts):
        return False
    address = address_of(remote)
    if bans.find(ADDRESS, address, state.wall_us) is not None:
        return True
    return lockouts.find(ADDRESS, address, state.now) is not None


def name_refusal(state: NodeState, connection: Connection, client_id: str) -> Rejection | None:
    """The reason why the proved user of a connection may not connect with a client id. CONNECT need
    not have contained the name: a certificate or a token may. The bans are checked again, because
    one may have been added while the proof was checked."""
    username = connection.username
    admission = state.admission
    if username:
        if username in admission.disabled_users:
            return Rejection("the user is disabled", reasons.NOT_AUTHORIZED)
        if admission.client_ids.get(username, client_id) != client_id:
            text = "the user may not use this client id"
            return Rejection(text, reasons.CLIENT_IDENTIFIER_NOT_VALID)
    return _ban_refusal(state, connection, client_id, username)


def room_refusal(state: NodeState, connection: Connection, client_id: str) -> Rejection | None:
    """The reason why a client may have no session of its own, which it has not had before."""
    users, limits = state.admission.users, state.config.admission
    username = connection.username
    if not connection.is_internal and not state.cluster.has_room(client_id):
        text = f"there are {state.config.sessions_max} sessions, which is the limit"
    elif users is not None and username and not users.has_room(username, client_id):
        text = f"this user has {limits.sessions_per_user} sessions, which is the limit"
    else:
        return None
    state.stats.refused_quota += 1
    return Rejection(text)


def note_failure(state: NodeState, connection: Connection, username: str = "") -> None:
    """Counts a failed authentication, and locks the client's names out after too many. `username`:
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
    for scope in limits.lockout_scopes:
        name = names[scope]
        if not name:
            continue
        if state.admission.meters.charged is not None:
            state.admission.reported.append((scope, name))
        lockout = count_failure(state, scope, name)
        if lockout is not None:
            state.stats.lockouts += 1
            fields: dict[str, object] = {
                "scope": scope,
                "name": name,
                "duration_s": round(limits.lockout_s),
                "reason": lockout.reason,
            }
            state.note("warning", "locked_out", fields)


def count_failure(state: NodeState, scope: str, name: str) -> LockedName | None:
    """Counts a failed authentication of a name, at this process or another one of the machine.
    Returns the lock-out that follows from it, or None."""
    limits, now = state.admission.limits, state.now
    failures = state.admission.failures
    if limits.lockout_failures <= 0 or scope not in limits.lockout_scopes:
        return None
    if failures.add(scope, name, limits.lockout_window_s, now) < limits.lockout_failures:
        return None
    failures.forget(scope, name)
    text = f"{limits.lockout_failures} failed authentications"
    lockout = LockedName(scope, name, now + limits.lockout_s, text)
    state.admission.lockouts.add(lockout)
    return lockout
