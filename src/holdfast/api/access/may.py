"""`GET /api/v1/may`: may a client publish to a topic or subscribe to a filter, and by which rule.

A connected client has its rights at its node, because they may have come with its token, so that
node replies. The rights of others follow from the user name and the client id.
"""

import asyncio
from typing import Final

from msgspec import Struct

from holdfast.api.endpoints import ApiRefusal, Call, Endpoint, Text, bad_request
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.views.pages import AbsentNode
from holdfast.api.views.sessions import is_connected
from holdfast.node.admission.explanation import (
    ACTIONS,
    PUBLISH,
    SUBSCRIBE,
    KnownRights,
    explain,
    known_rights,
)
from holdfast.node.delivery.replay_start import start_prefix
from holdfast.protocol.topics.names import (
    InvalidFilter,
    InvalidTopic,
    check_filter,
    decode_topic,
    queue_key,
)
from holdfast.security.access.scopes import Scope
from holdfast.security.acl import DENY
from holdfast.security.filter_verdict import ALLOWED, DENIED

CLIENT: Final = Text("client", "the client id", required=True, most=65_535)
ACTION: Final = Text("action", "the action", choices=ACTIONS, required=True)
TOPIC: Final = Text("topic", "the topic, or the filter", required=True, most=65_535)
USER: Final = Text("user", "a user name in place of that of the client's session", most=65_535)
WORDS: Final = {
    "publish": "publish to",
    "subscribe": "subscribe to",
    "history": "begin in the past with",
}


class MayQuestion(Struct, omit_defaults=True):
    """The question about a right. `user` "": that of the client's session."""

    client: str
    action: str
    topic: str
    user: str = ""


class DecidingRule(Struct):
    """A rule that leads to a verdict."""

    source: str
    """The file, `role NAME`, `defaultACLAccess`, or token, http or hook."""
    line: int
    """0: the source has no lines."""
    text: str
    allows: bool


class MayAnswer(Struct):
    """Whether a client may do something, and by which rules."""

    sentence: str
    verdict: str
    """allowed, denied, or partly: a filter of which some topics are allowed."""
    reason: str
    client: str
    user: str
    """Empty: without a user name."""
    action: str
    topic: str
    mount: str
    """The prefix of the topics of the client's listener; the rules are about topics with it."""
    connected: bool
    node: str
    """The node that has replied: of a connected client, its own."""
    rules: list[DecidingRule]
    """At most 20, in the order in which they decide."""
    notes: list[str] = []
    """Reasons for another answer: a ban, or rights that only a connection brings."""
    missing: list[AbsentNode] = []
    """The nodes that may have a connection of the client and did not reply."""


class FoundMay(Struct):
    """The answer of a node with the client's connection, or None."""

    found: MayAnswer | None = None


class MayRoutes:
    """The route of the question about a right."""

    def __init__(self, view: OwnNode, everywhere: Everywhere) -> None:
        self._view = view
        self._everywhere = everywhere
        everywhere.offer("may", MayQuestion, self._connected_here)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/api/v1/may", Scope.VIEWER,
                     "whether a client may publish, subscribe, or begin in the past, and by which"
                     " rule", self._may, MayAnswer, (CLIENT, ACTION, TOPIC, USER), refusals=(503,)),
        ]  # fmt: skip

    async def _may(self, call: Call) -> MayAnswer:
        question = MayQuestion(call[CLIENT], call[ACTION], call[TOPIC], call.get(USER) or "")
        _check(question.action, question.topic)
        here = await self._connected_here(question)
        if here.found is not None:
            return here.found
        others, missing = await self._everywhere.ask_others("may", question, FoundMay)
        for answer in others:
            if answer.found is not None:
                return answer.found
        user: str | None = question.user or None
        if user is None:
            session = self._view.find_session(question.client)
            user = None if session is None else session.username
        found = await self._answer(question, known_rights(self._view.state, question.client, user))
        found.missing = missing
        return found

    async def _connected_here(self, question: MayQuestion) -> FoundMay:
        """The answer for a client that is connected to this node, as the user in question."""
        if question.action not in ACTIONS:
            raise ApiRefusal(400, "a question of another version")
        state = self._view.state
        session = state.sessions.get(question.client)
        if session is None or not is_connected(session):
            return FoundMay()
        if question.user and session.username != question.user:
            return FoundMay()
        rights = known_rights(state, question.client, session.username)
        return FoundMay(await self._answer(question, rights))

    async def _answer(self, question: MayQuestion, rights: KnownRights) -> MayAnswer:
        # A filter may be compared with 10,000 rules.
        found = await asyncio.to_thread(explain, rights, question.action, question.topic)
        rules = [
            DecidingRule(rule.source, rule.line, rule.text(), rule.access != DENY)
            for rule in found.rules
        ]
        return MayAnswer(
            _sentence(question, rights, found.verdict, found.reason),
            found.verdict,
            found.reason,
            rights.client_id,
            rights.username or "",
            question.action,
            question.topic,
            rights.mount,
            rights.is_connected,
            self._view.node_id,
            rules,
            list(rights.notes),
        )


def _sentence(question: MayQuestion, rights: KnownRights, verdict: str, reason: str) -> str:
    user = f"user {rights.username!r}" if rights.username else "no user name"
    who = f"client {rights.client_id!r} ({user})"
    what = f"{WORDS[question.action]} {question.topic!r}"
    if verdict == ALLOWED:
        text = f"{who} may {what}: {reason}"
    elif verdict == DENIED:
        text = f"{who} may not {what}: {reason}"
        if question.action == SUBSCRIBE:
            text = f"{who} receives nothing from a subscription to {question.topic!r}: {reason}"
    else:
        text = f"{who} may {what} and receives a part of it: {reason}"
    return text + "".join(f"; {note}" for note in rights.notes)


def _check(action: str, topic: str) -> None:
    """Raises `ApiRefusal` (400) unless it is a valid topic, or filter of a subscription."""
    try:
        if action == PUBLISH:
            decode_topic(topic.encode())
        else:
            check_filter(queue_key(topic[len(start_prefix(topic)) :]))
    except (InvalidTopic, InvalidFilter, UnicodeEncodeError) as error:
        raise bad_request(f"topic: {error}") from None
