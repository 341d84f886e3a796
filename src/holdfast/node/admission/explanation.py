"""Explains a right by rule and line: may a client publish, subscribe, read the past?

It asks the same rules as the gate (`node.rights`) and decides nothing.
"""

from typing import Final

from msgspec import Struct, field

from holdfast.node.admission.client_rights import Rights
from holdfast.node.delivery.replay_start import start_prefix
from holdfast.node.node_state import NodeState
from holdfast.node.publish.control import COMMAND_TOPIC
from holdfast.node.publish.delayed_table import DELAYED_PREFIX, InvalidDelay, split_delayed
from holdfast.node.rights import is_reserved
from holdfast.protocol.topics.names import has_wildcard, is_shared, mounted_filter, split_shared
from holdfast.security.acl import DENY, HISTORY, READ, WRITE, AccessRule, ClientRules
from holdfast.security.filter_verdict import ALLOWED, DENIED, PARTLY, verdict_on_filter

PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
REPLAY: Final = "history"
ACTIONS: Final = (PUBLISH, SUBSCRIBE, REPLAY)
"""`history`: begin in the past with a topic or a filter."""


class KnownRights(Struct, frozen=True):
    """The rights of a client as a node knows them. They do not change, so any thread may read
    them."""

    client_id: str
    username: str | None
    is_connected: bool
    mount: str
    """The prefix of the topics of the client's listener, which it does not see."""
    rules: ClientRules | None
    """None: there are no rules, so the client may do everything."""
    takes_commands: bool = False
    has_wildcards: bool = True
    has_groups: bool = True
    notes: tuple[str, ...] = ()
    """Reasons for another answer."""


class RightVerdict(Struct, frozen=True):
    """A verdict, its reason in words, and the rules that lead to it."""

    verdict: str
    reason: str
    rules: tuple[AccessRule, ...] = field(default=())


def known_rights(state: NodeState, client_id: str, username: str | None) -> KnownRights:
    """The rights of a client at this node. `username`: a name that counts in place of that of the
    client's session; None: the session's, or none."""
    session = state.sessions.get(client_id)
    if session is not None and username is not None and session.username != username:
        session = None
    mount, rights, connection = b"", None, None
    if session is not None:
        username, rights, connection = session.username, session.rights, session.connection
    notes: list[str] = []
    if isinstance(rights, Rights):
        rules, mount = rights.acl, rights.mount
    else:
        rules = None if state.acl is None else state.acl.for_client(username, client_id)
    admission = state.admission
    if connection is None and (admission.asks_sources or admission.asks_rights):
        notes.append("a token, an HTTP check or a hook may give other rights when it connects")
    if connection is None and state.config.has_listener_rights:
        notes.append("a listener with rules or a mount of its own may give other rights")
    for scope, name in (("client", client_id), ("user", username or "")):
        ban = state.bans.find(scope, name, state.wall_us)
        if ban is not None:
            notes.append(ban.text(state.wall_us))
    if username in admission.disabled_users:
        notes.append("the user is disabled")
    return KnownRights(
        client_id,
        username,
        connection is not None,
        mount.decode(),
        rules,
        admission.takes_commands,
        state.config.wildcard_available,
        state.config.shared_available,
        tuple(notes),
    )


def explain(rights: KnownRights, action: str, filter: str) -> RightVerdict:
    """Whether the client may do it, and by which rules. `filter`: a valid topic or filter as the
    client names it. Its cost is that of all rules of the client if the filter has a wildcard."""
    if action == PUBLISH:
        if filter.startswith(DELAYED_PREFIX.decode()):
            # The right is that to the topic at which the message appears later.
            try:
                filter = split_delayed(filter.encode())[1].decode()
            except InvalidDelay as error:
                return RightVerdict(DENIED, str(error))
        return _on_publish(rights, rights.mount + filter)
    start = start_prefix(filter)
    wanted = mounted_filter(rights.mount, filter[len(start) :])
    if is_shared(wanted) and not rights.has_groups:
        return RightVerdict(DENIED, "limits.shared_available is false")
    plain = split_shared(wanted)[1] if is_shared(wanted) else wanted
    if has_wildcard(plain) and not rights.has_wildcards:
        return RightVerdict(DENIED, "limits.wildcard_available is false")
    rules = rights.rules
    if rules is None:
        return RightVerdict(ALLOWED, "there are no rules")
    subscribed = rules.subscription_verdict(wanted)
    if not subscribed.is_allowed:
        return RightVerdict(DENIED, subscribed.text(), _only(subscribed.rule))
    if action == REPLAY or start:
        past = rules.verdict_on(plain, HISTORY)
        if not past.is_allowed:
            return RightVerdict(DENIED, f"the past: {past.text()}", _only(past.rule))
    if has_wildcard(plain):
        return _on_filter(rules, plain)
    received = rules.verdict_on(plain, READ)
    verdict = ALLOWED if received.is_allowed else DENIED
    return RightVerdict(verdict, received.text(), _only(received.rule))


def _on_publish(rights: KnownRights, topic: str) -> RightVerdict:
    is_command = topic == COMMAND_TOPIC and rights.takes_commands
    rules = rights.rules
    if is_reserved(topic) and not is_command:
        return RightVerdict(DENIED, f"{topic.partition('/')[0]} is the broker's")
    if rules is None:
        if is_command:
            return RightVerdict(DENIED, "without rules no client may send commands")
        return RightVerdict(ALLOWED, "there are no rules")
    found = rules.verdict_on(topic, WRITE)
    return RightVerdict(ALLOWED if found.is_allowed else DENIED, found.text(), _only(found.rule))


def _on_filter(rules: ClientRules, filter: str) -> RightVerdict:
    found = verdict_on_filter(rules.in_order(READ, filter), filter)
    if not found.rules:
        return RightVerdict(found.verdict, "no rule allows it")
    parts = [
        f"{rule.place()} {'denies' if rule.access == DENY else 'allows'} ({rule.text()})"
        for rule in found.rules
    ]
    if found.verdict == PARTLY and all(rule.access != DENY for rule in found.rules):
        parts.append("no rule allows the rest")
    return RightVerdict(found.verdict, "; ".join(parts), found.rules)


def _only(rule: AccessRule | None) -> tuple[AccessRule, ...]:
    return () if rule is None else (rule,)
