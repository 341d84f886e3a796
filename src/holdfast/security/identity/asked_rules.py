"""Keeps a service's decisions about one client's rights, one topic at a time.

The rules have the decisions that the service has made so far. A topic without a decision is denied;
the gate (`node.topic_rights.questions`) has the service asked before it lets a packet in.

Invariants
- A decision to publish counts until its time, which the gate enforces with a timer.
- A decision to subscribe counts for deliveries until there is a later one about the same filter, or
  the connection ends. Counter-example with a time: a message that is delivered a second too late
  would be passed over, and the session's cursor with it.
- The memory is bounded: `PUBLISH_BYTES_MAX`, the filters of the session's subscriptions,
  `SPARE_BYTES_MAX`, and the filters of the present SUBSCRIBE.
"""

from collections.abc import Container, Iterable, Iterator
from typing import Final

from msgspec import Struct

from holdfast.protocol.topics.names import (
    InvalidFilter,
    check_filter,
    is_shared,
    queue_key,
    split_shared,
)
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast.security.acl import (
    DENY,
    HISTORY,
    READ,
    WRITE,
    AccessRule,
    AccessVerdict,
    ClientRules,
    OrderedRule,
)

PUBLISH: Final = "publish"
SUBSCRIBE: Final = "subscribe"
"""The actions that the service is asked about."""

ALLOW: Final = "allow"
DENIED: Final = "deny"
IGNORE: Final = "ignore"
"""The verdicts of the service. "ignore": the rules of `acl_file` decide."""
FAILED: Final = "failed"
"""The verdict in place of a reply that did not come, or means nothing."""

PUBLISH_BYTES_MAX: Final = 256 << 10
"""The most bytes of decisions to publish that are remembered for one client."""
DECISION_BYTES: Final = 250
"""The memory in bytes of one decision, beside its topic."""
SPARE_BYTES_MAX: Final = 128 << 10
"""The bytes of decisions about filters without a subscription that are kept until they are
cleared."""
SOURCE: Final = "security.http.topic_url"
"""The source of these rules, for explanations."""


class TopicDecision(Struct, frozen=True):
    """A verdict, and the time until which it counts, on the node's monotonic clock in seconds."""

    verdict: str
    until: float


class AskedRules(ClientRules):
    """The decisions about one client."""

    def __init__(self) -> None:
        self.fallback: ClientRules | None = None
        """The rules that decide where the service does not; None: nothing is allowed there."""
        self.is_asking = False
        """Whether a question is open. The client's packets wait meanwhile."""
        self.timer: object = None
        """The timer for the decision to publish that ends first, or None."""
        self.timer_at = 0.0
        self.will_verdict = ""
        self.resuming: list[str] | None = None
        """The filters of the resumed session that are still to be asked about; None: nobody has
        begun."""
        self.unanswered: frozenset[str] = frozenset()
        """The filters of the present SUBSCRIBE that the service has not decided about."""
        self._publish: dict[str, TopicDecision] = {}
        self._publish_bytes = 0
        self._filters: dict[str, TopicDecision] = {}
        self._filters_bytes = 0
        self._granted = SubscriptionTrie()

    # Publishing

    def publish_verdict(self, topic: str) -> str:
        """The verdict about a topic, "" if the service must be asked."""
        decision = self._publish.get(topic)
        return "" if decision is None else decision.verdict

    def decide_publish(self, topic: str, decision: TopicDecision) -> bool:
        """Remembers a decision. True: those of before were forgotten for want of room."""
        if topic not in self._publish:
            self._publish_bytes += len(topic) + DECISION_BYTES
        is_full = self._publish_bytes > PUBLISH_BYTES_MAX
        if is_full:
            self._publish.clear()
            self._publish_bytes = len(topic) + DECISION_BYTES
        self._publish[topic] = decision
        return is_full

    def expire(self, now: float) -> list[str]:
        """Forgets the decisions whose time is over, and returns their topics."""
        over = [topic for topic, each in self._publish.items() if each.until <= now]
        for topic in over:
            del self._publish[topic]
            self._publish_bytes -= len(topic) + DECISION_BYTES
        return over

    def next_end(self) -> float | None:
        """The time of the next decision that ends, or None."""
        return min((each.until for each in self._publish.values()), default=None)

    # Subscribing

    def unasked(self, filters: Iterable[str], now: float) -> list[str]:
        """The plain filters, each once, about which there is no decision at this time. Invalid ones
        are left out: they are refused without a question."""
        found: dict[str, None] = {}
        for filter in filters:
            known = self._filters.get(filter)
            plain = filter if known is not None else plain_filter(filter)
            known = known or self._filters.get(plain)
            if plain and (known is None or known.until <= now):
                found[plain] = None
        return list(found)

    def decide_filter(self, plain: str, decision: TopicDecision) -> None:
        """Remembers a decision about a filter. One that failed leaves the one before in force."""
        if decision.verdict == FAILED:
            return
        if plain not in self._filters:
            self._filters_bytes += decision_bytes(plain)
        self._filters[plain] = decision
        self._granted.remove(plain, plain)
        if decision.verdict != DENIED:
            self._granted.add(plain, plain, decision.verdict)

    def has_spare_filters(self, subscribed_bytes: int) -> bool:
        """Whether decisions about filters without a subscription take too much memory.
        `subscribed_bytes`: the `decision_bytes` of all subscriptions.

        Another clearing follows only after as many bytes as the subscriptions have, because each
        looks at all of these.
        """
        return self._filters_bytes > 2 * subscribed_bytes + SPARE_BYTES_MAX

    def keep_filters(self, subscribed: Container[str]) -> None:
        """Forgets the decisions about filters without a subscription."""
        for plain in [each for each in self._filters if each not in subscribed]:
            del self._filters[plain]
            self._filters_bytes -= decision_bytes(plain)
            self._granted.remove(plain, plain)

    def has_decision(self, plain: str) -> bool:
        """Whether the service has decided about a filter since the client connected."""
        return plain in self._filters

    # The rights

    def can_read(self, topic: str) -> bool:
        """Whether a filter that the client may subscribe to matches the topic."""
        verdicts = self._granted.match(topic)
        if ALLOW in verdicts:
            return True
        return bool(verdicts) and self.fallback is not None and self.fallback.can_read(topic)

    def can_write(self, topic: str) -> bool:
        return self._allows(self.publish_verdict(topic), topic)

    def can_leave(self, topic: str) -> bool:
        return self._allows(self.will_verdict, topic)

    def can_replay(self, topic: str) -> bool:
        """The service is not asked about the past, so `acl_file` alone gives this right."""
        return self.fallback is not None and self.fallback.can_replay(topic)

    def subscription_verdict(self, filter: str) -> AccessVerdict:
        plain = plain_filter(filter)
        known = self._filters.get(plain)
        if known is None or plain in self.unanswered:
            return AccessVerdict(False)
        if known.verdict == IGNORE and self.fallback is not None:
            return self.fallback.subscription_verdict(filter)
        is_allowed = known.verdict == ALLOW
        return AccessVerdict(is_allowed, _rule(READ if is_allowed else DENY, plain))

    def verdict_on(self, topic: str, wanted: int) -> AccessVerdict:
        if wanted == HISTORY:
            return _fallback_verdict(self.fallback, topic, wanted)
        if wanted == WRITE:
            verdict = self.publish_verdict(topic)
        elif ALLOW in (matching := self._granted.match(topic)):
            verdict = ALLOW
        else:
            verdict = IGNORE if matching else ""
        if verdict == IGNORE:
            return _fallback_verdict(self.fallback, topic, wanted)
        if verdict == ALLOW:
            return AccessVerdict(True, _rule(wanted, topic))
        return AccessVerdict(False, _rule(DENY, topic) if verdict else None)

    def in_order(self, wanted: int, filter: str) -> Iterator[OrderedRule]:
        if wanted == READ:
            for plain, decision in self._filters.items():
                if decision.verdict == ALLOW:
                    yield plain, _rule(READ, plain)
        elif self.fallback is not None:
            yield from self.fallback.in_order(wanted, filter)

    def _allows(self, verdict: str, topic: str) -> bool:
        if verdict == IGNORE:
            return self.fallback is not None and self.fallback.can_write(topic)
        return verdict == ALLOW


def decision_bytes(filter: str) -> int:
    """The bytes that a decision about a filter counts for: its length in UTF-8, and a share."""
    return (len(filter) if filter.isascii() else len(filter.encode())) + DECISION_BYTES


def plain_filter(filter: str) -> str:
    """The filter of the messages of a subscription, shared or not; "" if it is invalid."""
    key = queue_key(filter)
    try:
        plain = split_shared(key)[1] if is_shared(key) else key
        check_filter(plain)
    except InvalidFilter:
        return ""
    return plain


def _fallback_verdict(fallback: ClientRules | None, topic: str, wanted: int) -> AccessVerdict:
    return AccessVerdict(False) if fallback is None else fallback.verdict_on(topic, wanted)


def _rule(access: int, filter: str) -> AccessRule:
    return AccessRule(access, filter, SOURCE)
