"""Asks a service that decides about topics one at a time, and applies its answers.

It is a part of the gate (`node.rights`): it puts decisions into the rules that the gate reads.

A PUBLISH to a topic without a decision goes back to the connection's input, which is paused until
the answer has come. So the packet and all behind it keep their order, what waits is bounded by the
socket's buffers, and no other client waits. A SUBSCRIBE waits in its question. The subscriptions of
a resumed session are asked about before CONNACK.
"""

from collections.abc import Iterable
from typing import Final

from holdfast.node.admission.client_rights import Rights
from holdfast.node.admission.control import Proof
from holdfast.node.delivery.replay_start import start_prefix
from holdfast.node.effects import AskTopics, Proceed, ResumeInput
from holdfast.node.node_state import NodeState
from holdfast.node.session.connection import CLOSED, Connection
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import TOPIC_RIGHTS
from holdfast.protocol.mqtt.packets import Subscribe
from holdfast.protocol.topics.names import is_delayed_filter
from holdfast.security.acl import ClientRules
from holdfast.security.identity.asked_rules import (
    DECISION_BYTES,
    FAILED,
    PUBLISH,
    SUBSCRIBE,
    AskedRules,
    TopicDecision,
    plain_filter,
)

FAILED_S: Final = 1.0
"""The seconds for which a publish to a topic is refused without a further question, after one that
failed."""
EXPIRY_STEP_S: Final = 1.0
"""The least seconds between two looks at a client's decisions."""
FILTERS_ASKED_MAX: Final = 1000
"""The most filters of one SUBSCRIBE that the service is asked about. Others are refused."""
RESUMED_AT_ONCE: Final = 500
"""The most filters of a resumed session in one question. The decisions about 10,000 would hold the
loop for 0.1 s."""

UNANSWERED: Final = "the service that decides about topics does not reply: try again later"


def asked_rules(connection: Connection) -> AskedRules | None:
    """The rules of a client about whose topics a service decides, or None. They come with a `proof`
    of the connection, so a caller that is compiled looks at that first."""
    rights = connection.rights
    acl: ClientRules | None = rights.acl if isinstance(rights, Rights) else None
    return acl if isinstance(acl, AskedRules) else None


def new_asked_rules(state: NodeState, connection: Connection) -> AskedRules | None:
    """Rules for an authenticated client that connects. None: its rules came with its proof of
    identity, or are those of its listener."""
    proof = connection.proof
    has_own = isinstance(proof, Proof) and proof.identity.rules is not None
    if has_own or connection.listener.acl is not None:
        return None
    return AskedRules()


def is_waiting(connection: Connection) -> bool:
    """Whether an answer is awaited, so that no packet of the client may be read."""
    rules = asked_rules(connection)
    return rules is not None and rules.is_asking


def asks_to_publish(state: NodeState, connection: Connection, topic: str) -> bool:
    """Asks whether the client may publish to a topic, unless that is decided. True: the packet is
    in the input again, and comes back after the answer."""
    rules = asked_rules(connection)
    if rules is None or rules.publish_verdict(topic):
        return False
    reader = connection.reader
    assert reader is not None
    reader.unread()
    state.stats.packets_received -= 1
    state.stats.publish_received -= 1
    _ask(state, rules, AskTopics(connection, PUBLISH, [topic], None))
    return True


def is_unanswered(connection: Connection, topic: str) -> bool:
    """Whether the service could not be asked whether the client may publish to a topic."""
    rules = asked_rules(connection)
    return rules is not None and rules.publish_verdict(topic) == FAILED


def asks_to_subscribe(
    state: NodeState, connection: Connection, packet: Subscribe, proceed: Proceed
) -> bool:
    """Asks about the filters of a SUBSCRIBE that are not decided. True: `proceed` continues it."""
    rules = asked_rules(connection)
    if rules is None:
        return False
    filters: list[str] = []
    for request in packet.subscriptions:
        if not is_delayed_filter(request.filter):
            filters.append(request.filter[len(start_prefix(request.filter)) :])
    _forget_filters(connection, rules, filters)
    wanted = rules.unasked(filters, state.now)
    rules.unanswered = frozenset(wanted[FILTERS_ASKED_MAX:])
    if not wanted:
        return False
    _ask(state, rules, AskTopics(connection, SUBSCRIBE, wanted[:FILTERS_ASKED_MAX], proceed))
    return True


def _forget_filters(connection: Connection, rules: AskedRules, wanted: list[str]) -> None:
    """Forgets decisions about filters without a subscription, if they take too much memory. Those
    of the `wanted` filters stay: they are not subscribed to yet."""
    session = connection.session
    if session is None:
        return
    subscribed = session.subscriptions
    size_bytes = session.filter_bytes + len(subscribed) * DECISION_BYTES
    if rules.has_spare_filters(size_bytes):
        rules.keep_filters({plain_filter(each) for each in (*subscribed, *wanted)})


def is_filter_unanswered(connection: Connection, filter: str) -> bool:
    """Whether the service could not be asked about a filter of the present SUBSCRIBE."""
    rules = asked_rules(connection)
    return rules is not None and plain_filter(filter) in rules.unanswered


def asks_to_resume(
    state: NodeState, connection: Connection, session: Session, proceed: Proceed
) -> bool:
    """Asks about the next subscriptions that a session has from an earlier connection. True:
    `proceed` continues, and calls this again. The client of a service that fails is refused,
    because messages of its session would otherwise be passed over."""
    rules = asked_rules(connection)
    return rules is not None and asks_about(state, connection, session.subscriptions, proceed)


def asks_about(
    state: NodeState, connection: Connection, filters: Iterable[str], proceed: Proceed
) -> bool:
    """`asks_to_resume`, of a session that has these filters. They count in the first call."""
    rules = asked_rules(connection)
    if rules is None:
        return False
    if rules.resuming is None:
        rules.resuming = list(filters)
    rules.unanswered = frozenset()
    while rules.resuming:
        part = rules.resuming[-RESUMED_AT_ONCE:]
        del rules.resuming[-RESUMED_AT_ONCE:]
        # All decisions count here, also one whose time was over when the last reply came.
        wanted = rules.unasked(part, float("-inf"))
        if wanted:
            _ask(state, rules, AskTopics(connection, SUBSCRIBE, wanted, proceed))
            return True
    rules.resuming = None
    return False


def _ask(state: NodeState, rules: AskedRules, effect: AskTopics) -> None:
    rules.is_asking = True
    effect.connection.input_paused = True
    state.effects.append(effect)


def handle_topics(state: NodeState, effect: AskTopics, answers: list[tuple[str, float]]) -> None:
    """Continues what waits for the answers: per topic a verdict, and the seconds for which it
    counts. The client may have left meanwhile."""
    connection = effect.connection
    rules = asked_rules(connection)
    if connection.state == CLOSED or rules is None:
        return
    rules.is_asking = False
    # Its packets waited in the socket, so it could not show that it lives.
    connection.last_received = state.now
    if effect.action == PUBLISH:
        for topic, answer in zip(effect.topics, answers, strict=True):
            _decide_publish(state, connection, rules, topic, answer)
    else:
        failed = set(rules.unanswered)
        for filter, (verdict, lasts_s) in zip(effect.topics, answers, strict=True):
            if verdict == FAILED:
                state.stats.topic_questions_failed += 1
                failed.add(filter)
            else:
                rules.decide_filter(filter, TopicDecision(verdict, state.now + lasts_s))
        rules.unanswered = frozenset(failed)
        _change_reads(state, connection, rules)
    if effect.proceed is not None:
        connection.input_paused = False
        effect.proceed(state, connection)
        if connection.input_paused:
            # It waits for something else now: the start of a subscription in the past.
            return
        connection.input_paused = True
        # Without this a SUBSCRIBE of the largest size would be remembered until the next one.
        _forget_filters(connection, rules, [])
    state.effects.append(ResumeInput(connection))


def _decide_publish(
    state: NodeState,
    connection: Connection,
    rules: AskedRules,
    topic: str,
    answer: tuple[str, float],
) -> None:
    verdict, lasts_s = answer
    if verdict == FAILED:
        state.stats.topic_questions_failed += 1
        lasts_s = FAILED_S
    rights = connection.rights
    assert isinstance(rights, Rights)
    if rules.decide_publish(topic, TopicDecision(verdict, state.now + lasts_s)):
        rights.forget_writes()
    else:
        rights.forget_write(topic.encode())
    _arm(state, connection, rules, state.now + lasts_s)


def _arm(state: NodeState, connection: Connection, rules: AskedRules, end: float) -> None:
    """Makes sure that the decisions are looked at when one of them ends. Of two timers the earlier
    one stays: a failure of a second may follow a decision of a day."""
    when = max(end, state.now + EXPIRY_STEP_S)
    if rules.timer is None or when < rules.timer_at:
        state.cancel(rules.timer)
        rules.timer = state.arm(when, TOPIC_RIGHTS, connection)
        rules.timer_at = when


def forget_decisions(state: NodeState, connection: Connection) -> None:
    """Cancels the timer of a connection that is closed. It would keep the connection and up to
    `PUBLISH_BYTES_MAX` in memory, maybe for a day."""
    rules = asked_rules(connection)
    if rules is not None:
        state.cancel(rules.timer)
        rules.timer = None


def _change_reads(state: NodeState, connection: Connection, rules: AskedRules) -> None:
    """Makes deliveries follow the decisions about filters."""
    session = connection.session
    rights = connection.rights
    assert isinstance(rights, Rights)
    rights.reads = None
    state.change_routes()
    if session is not None:
        for group in session.groups or ():
            group.changes += 1


def handle_topic_expiry(state: NodeState, connection: Connection) -> None:
    """Forgets the decisions whose time is over. The next PUBLISH is asked about again."""
    rules = asked_rules(connection)
    rights = connection.rights
    if connection.state == CLOSED or rules is None or not isinstance(rights, Rights):
        return
    for topic in rules.expire(state.now):
        rights.forget_write(topic.encode())
    rules.timer = None
    end = rules.next_end()
    if end is not None:
        _arm(state, connection, rules, end)
