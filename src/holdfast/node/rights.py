"""Decides the rights of clients: the topics that each may read and write, and the user of each
session.

This is the one gate. Every path that brings a message to a client checks `may_read`; every path
that brings a client's message into the log checks `may_write` or, for a will, `may_leave`. No other
module touches an access control list (`tests/unit/test_rights_gate.py` lists all paths).

Invariants
- A client is sent no PUBLISH whose topic it may not read by the rules of its connection, however
  the message comes to it: live, from the log, inflight from an earlier connection, retained,
  through a shared group, or from another node or member. What waits is checked again when it is
  sent, by the rules of that moment.
- No record of a client's message is appended whose topic the client may not write. A will is
  checked at CONNECT and again when it is published: a process with other rules may have started
  since.
- A user name is one that the client has proved. So a session with a `username` belongs to that
  user. The exception is a session that an older version wrote, because those versions also recorded
  names without proof (`is_owned`).
"""

from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Final

from holdfast.node.admission.client_rights import Rights
from holdfast.node.admission.control import Proof
from holdfast.node.node_state import NodeState, Route, Work
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Group, Session
from holdfast.node.state.recorded_state import RIGHTS_CHANGED
from holdfast.protocol.topics.names import is_delayed_filter, is_queue
from holdfast.security.acl import WRITE, ClientRules, RuleSource
from holdfast.security.identity.asked_rules import AskedRules

READABLE_MAX: Final = 1000
"""The most topics for which a group remembers whether any member may read them."""
READABLE_TOPIC_BYTES: Final = 1000
"""The most bytes of a topic that a group remembers. Longer ones are looked up each time."""
LOG_PREFIX: Final = "$log/"
"""The beginning of the topics with the progress of the log's readers."""


def is_reserved(topic: str) -> bool:
    """Whether no client's message to the topic is published. `$SYS` and `LOG_PREFIX` are the
    broker's, `$delayed` waits. A message to `$CONTROL` is a command, maybe with a password."""
    if topic.startswith(("$SYS/", "$CONTROL/")) or topic in ("$SYS", "$CONTROL"):
        return True
    return topic.startswith((LOG_PREFIX, "$delayed/"))


def is_bridge_notice(topic: str) -> bool:
    """Whether the topic is that of the will of a Mosquitto bridge.

    Such bridges leave a will there by default and stop using a broker that refuses it. So the
    broker accepts the connection and forgets the will.
    """
    return topic.startswith("$SYS/broker/connection/") and topic.endswith("/state")


def may_subscribe(session: Session, filter: str) -> bool:
    """Whether the session's client may subscribe to a filter. Most rules allow any filter, and
    restrict the messages (`may_read`). Nobody reads messages before they are due."""
    rights = session.rights
    if is_delayed_filter(filter):
        return False
    return not isinstance(rights, Rights) or rights.acl is None or rights.acl.can_subscribe(filter)


def may_unsubscribe(session: Session, filter: str) -> bool:
    """Whether the session's client may unsubscribe from a filter."""
    rules = session.rights.acl if isinstance(session.rights, Rights) else None
    return rules is None or rules.can_unsubscribe(filter)


def may_command(connection: Connection, route: Route) -> bool:
    """Whether the client may send a command to this topic of `$CONTROL`. Without rules no client
    may."""
    rules = connection.rights.acl if isinstance(connection.rights, Rights) else None
    return rules is not None and rules.can_write(route.topic)


def may_read(session: Session, topic: bytes) -> bool:
    """Whether the session's client may receive a message of this topic. The session must have been
    connected since this process started."""
    rights = session.rights
    if rights is None:
        return True
    assert isinstance(rights, Rights)
    reads = rights.reads
    known = None if reads is None else reads.get(topic)
    return rights.learn_read(topic) if known is None else known


def may_replay(session: Session, topic: str) -> bool:
    """Whether the session's client may begin in the past with this topic, or with all topics that
    match this filter: a wildcard is covered by one at its place. [MQTT-4.7.1-1]"""
    rights = session.rights
    if rights is None:
        return True
    assert isinstance(rights, Rights)
    return rights.acl is None or rights.acl.can_replay(topic)


def may_write(connection: Connection, route: Route) -> bool:
    """Whether the client may publish to the route's topic."""
    if route.reserved:
        return False
    rights = connection.rights
    if rights is None:
        return True
    assert isinstance(rights, Rights)
    writes = rights.writes
    known = None if writes is None else writes.get(route.raw)
    return rights.learn_write(route.raw, route.topic) if known is None else known


def write_denial(connection: Connection, topic: str) -> str:
    """The rule that denies a publish to a topic, in words."""
    rights = connection.rights
    if isinstance(rights, Rights) and rights.acl is not None:
        verdict = rights.acl.verdict_on(topic, WRITE)
        if not verdict.is_allowed:
            return verdict.text()
    return "no rule allows it"


def may_leave_now(state: NodeState, connection: Connection, topic: str) -> bool:
    """Whether a client that connects may leave a will to this topic."""
    rules = _given_rules(connection)
    if rules is None:
        names = (connection.username, connection.client_id)
        rules = _rules_for(state, connection.listener, *names)
    elif isinstance(rules, AskedRules):
        rules.fallback = _rules_for(state, None, connection.username, connection.client_id)
    return not is_reserved(topic) and (rules is None or rules.can_leave(topic))


def may_publish_will(state: NodeState, session: Session, topic: str) -> bool:
    """Whether the will of a session may be published. Given rules, and those of a listener, count
    while this process knows them; they were checked when the client connected."""
    rights = session.rights if isinstance(session.rights, Rights) else None
    if rights is not None and rights.is_given:
        rules = rights.acl
    else:
        listener = None if rights is None else rights.listener
        rules = _rules_for(state, listener, session.username, session.client_id)
    return not is_reserved(topic) and (rules is None or rules.can_leave(topic))


def has_passing_rules(connection: Connection) -> bool:
    """Whether the client's rules came with its proof of identity, or are those of its listener, so
    that they cannot be asked for later."""
    rights = connection.rights
    is_given = isinstance(rights, Rights) and rights.is_given
    return is_given or _given_rules(connection) is not None or connection.listener.acl is not None


def may_publish_later(state: NodeState, username: str | None, client_id: str, topic: str) -> bool:
    """Whether a delayed message of a client may be published now, by the node's rules."""
    rules = _rules_for(state, None, username, client_id)
    return not is_reserved(topic) and (rules is None or rules.can_write(topic))


def may_read_later(state: NodeState, session: Session, topic: bytes) -> bool:
    """`may_read` for any session, also one from the log. The keeper of a queue reads nothing."""
    if session.rights is None:
        session.rights = _rights_of(state, session)
    return may_read(session, topic) and not is_queue(session.client_id)


def may_any_read(state: NodeState, group: Group, topic: bytes) -> bool:
    """Whether any member of the group, connected or not, may receive a message of this topic. A
    queue waits for one that may. Otherwise a client that may read nothing, which anybody may let
    subscribe, would empty it. The group also waits for a member about whose filter a service has
    not decided since it came back."""
    if not has_rules(state) or group.key in state.recorded.queues:
        return True
    if group.readable_at != group.changes or len(group.readable) >= READABLE_MAX:
        group.readable.clear()
        group.readable_at = group.changes
    known = group.readable.get(topic)
    if known is None:
        known = any(
            may_read_later(state, session, topic) or _is_undecided(session, group.filter)
            for session in group.members
        )
        if len(topic) <= READABLE_TOPIC_BYTES:
            group.readable[topic] = known
    return known


def _is_undecided(session: Session, filter: str) -> bool:
    rules = session.rights.acl if isinstance(session.rights, Rights) else None
    return isinstance(rules, AskedRules) and not rules.has_decision(filter)


def has_rules(state: NodeState) -> bool:
    """Whether some clients may do less than others."""
    # Rules may come with a proof of identity, or from hooks.
    is_given = state.admission.asks_sources or state.admission.asks_rights
    return state.acl is not None or state.config.has_listener_rights or is_given


def forget(session: Session) -> None:
    """Forgets the rights of a session, because its user has changed."""
    session.rights = None


def attach(state: NodeState, session: Session, connection: Connection) -> None:
    """Gives the session the user and the rights of this connection."""
    if state.admission.users is not None:
        state.admission.users.assign(session.client_id, connection.username)
    session.username = connection.username
    session.is_owned = connection.username is not None
    _give_rights(state, session)
    connection.rights = session.rights


def attach_rights_of(
    state: NodeState,
    session: Session,
    connection: Connection,
    identity: tuple[str | None, str] | None,
) -> str:
    """Gives a client of the admin port the rights of a user and a client id. None: of the operator,
    who may write every topic but those of the broker, also when a delayed message is due. Returns
    the reason if nobody here knows those rights, or ""."""
    rights: Rights | None = Rights(None, b"", is_given=True)
    if identity is not None:
        owner = state.sessions.get(identity[1])
        present = None if owner is None or owner.connection is None else owner.rights
        if isinstance(present, Rights) and owner is not None and owner.username == identity[0]:
            if isinstance(present.acl, AskedRules):
                return "a service decides about the rights of this client, and asks the client only"
            is_given = present.is_given or present.listener is not None
            rights = Rights(present.acl, present.mount, is_given=is_given, acts_for=identity)
        elif state.acl is not None:
            rules = state.acl.for_client(identity[0], identity[1])
            rights = Rights(rules, b"", acts_for=identity)
        elif has_rules(state):
            return "the rights of this client are known while it is connected to this node"
        else:
            rights = None
    session.rights = connection.rights = rights
    return ""


def acting_for(connection: Connection) -> tuple[str | None, str] | None:
    """The user and client id whose rights a client of the admin port has; None: its own."""
    rights = connection.rights
    return rights.acts_for if isinstance(rights, Rights) else None


class RulesChange(Work):
    """The job that gives the present rules to all sessions that had rights by others. A step is one
    session. A client that connects meanwhile has the present rules already.

    Remembered routes depend on the rights of their receivers, so they are forgotten before the
    first step and after the last, or with each session of the users whose rules changed.
    """

    def __init__(
        self,
        sessions: Iterable[Session],
        *,
        all_sessions: bool,
        usernames: frozenset[str] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """`all_sessions`: also those without rights, because there were no rules before.
        `usernames`: the users whose rules changed; None: all. `done` is called at the end."""
        super().__init__()
        self.sessions = iter(sessions)
        self.all_sessions = all_sessions
        self.usernames = usernames
        self.done = done

    def step(self, state: NodeState, steps: int) -> int:
        done = 0
        for session in islice(self.sessions, steps):
            done += 1
            if self.usernames is not None:
                if session.username not in self.usernames:
                    continue
                state.change_routes()
            # Other sessions are known from the log only, and get their rights when they need them.
            if session.rights is not None or session.connection is not None or self.all_sessions:
                _give_rights(state, session)
        self.has_more = done == steps
        if not self.has_more:
            if self.usernames is None:
                state.change_routes()
            state.arm(state.now, RIGHTS_CHANGED, None)
            if self.done is not None:
                self.done()
        return done


def replace_rules(
    state: NodeState,
    acl: RuleSource | None,
    recorded: Iterable[Session],
    usernames: frozenset[str] | None = None,
    done: Callable[[], None] | None = None,
) -> None:
    """Gives other rules to all clients: at once to those that connect, and to the sessions of
    this node and the `recorded` ones as a job (`RulesChange`), which calls `done`."""
    all_sessions = state.acl is None
    state.acl = acl
    if usernames is None:
        state.change_routes()
    sessions = chain(state.list_sessions(), recorded)
    change = RulesChange(sessions, all_sessions=all_sessions, usernames=usernames, done=done)
    state.start_work(change)


def _given_rules(connection: Connection | None) -> ClientRules | None:
    proof = None if connection is None else connection.proof
    return proof.identity.rules if isinstance(proof, Proof) else None


def give_asked_rules(connection: Connection) -> None:
    """Gives a connection without a session the rules about whose topics a service decides."""
    given = _given_rules(connection)
    if isinstance(given, AskedRules):
        connection.rights = Rights(given, connection.mount, is_given=True)


def _give_rights(state: NodeState, session: Session) -> None:
    rights = session.rights
    if session.connection is None and isinstance(rights, Rights) and rights.is_given:
        return
    session.rights = rights = _rights_of(state, session)
    if session.connection is not None:
        session.connection.rights = rights
    for group in session.groups or ():
        group.changes += 1


def _rights_of(state: NodeState, session: Session) -> Rights | None:
    connection = session.connection
    given = _given_rules(connection)
    if connection is None:
        # The client of an earlier process has none: its listener is not known.
        before = session.rights if isinstance(session.rights, Rights) else None
        mount = b"" if before is None else before.mount
        listener = None if before is None else before.listener
    else:
        mount = connection.mount
        listener = connection.listener
        if given is not None:
            if isinstance(given, AskedRules):
                given.fallback = _rules_for(state, None, session.username, session.client_id)
            return Rights(given, mount, is_given=True)
    if session.is_internal:
        return None
    rules = _rules_for(state, listener, session.username, session.client_id)
    if rules is None and not mount:
        return None
    return Rights(rules, mount, listener)


def _rules_for(
    state: NodeState, listener: ListenerRules | None, username: str | None, client_id: str
) -> ClientRules | None:
    """The rules by the listener's own source, or else the node's. None: everything is allowed."""
    source = None if listener is None else listener.acl
    if source is None:
        source = state.acl
    return source.for_client(username, client_id) if isinstance(source, RuleSource) else None


def proves_names(state: NodeState) -> bool:
    """Whether clients can prove user names to this broker. If not, a name is not trusted, and
    sessions belong to no user."""
    return (
        state.config.authenticates_users
        or state.admission.checks_passwords
        or state.admission.asks_sources
        or len(state.admission.authenticators) > 0
    )


def may_be_anonymous(state: NodeState, connection: Connection) -> bool:
    """Whether the connection's client needs no user name."""
    own = connection.listener.allow_anonymous
    return state.config.allow_anonymous if own is None else own


def may_open(state: NodeState, session: Session, connection: Connection) -> bool:
    """Whether the client may resume or end the session."""
    if not session.is_owned or not proves_names(state):
        return True
    return session.username == connection.username
