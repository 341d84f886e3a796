"""Policy of a link: topics, sizes and rates that may cross it. Each end enforces its own.

A link withholds a message that may not cross, and the message takes no other way. At QoS 1 and 2 a
Skip continues in its place, so later messages of the stream do not wait for it.
"""

from dataclasses import dataclass
from typing import Final

from holdfast.protocol.topics.trie import SubscriptionTrie

PAYLOAD_BYTES_MAX: Final = 268_435_455
"""The most bytes of a payload; MQTT allows no larger packet."""
UNLIMITED: Final = float("inf")


@dataclass(frozen=True)
class LinkPolicy:
    """The limits of one link. Filters are plain ones, and a denial wins over an allowance."""

    export_allow: tuple[str, ...] = ("#",)
    export_deny: tuple[str, ...] = ()
    import_allow: tuple[str, ...] = ("#",)
    import_deny: tuple[str, ...] = ()
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """The most bytes of a payload, in both directions."""
    messages_per_s: float = UNLIMITED
    """The most messages per second in each direction. A message above the rate is lost at QoS 0.
    At QoS 1 and 2 its origin retransmits it, with growing delays."""
    bytes_per_s: float = UNLIMITED
    """The most bytes of topics, payloads and properties per second in each direction."""
    burst_s: float = 1.0
    """The seconds of the rates that may cross at once after silence."""


OPEN: Final = LinkPolicy()


class Allowance:
    """A token bucket that may go below zero.

    A message larger than the bucket would otherwise never cross. Here it crosses, and later
    messages wait until the debt is paid.
    """

    def __init__(self, rate_per_s: float, burst_s: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._depth = max(rate_per_s * burst_s, 1.0)
        self._left = self._depth
        self._filled_at = now

    def has(self, now: float) -> bool:
        if self._rate_per_s == UNLIMITED:
            return True
        self._left = min(self._depth, self._left + (now - self._filled_at) * self._rate_per_s)
        self._filled_at = now
        return self._left > 0.0

    def spend(self, amount: float) -> None:
        if self._rate_per_s != UNLIMITED:
            self._left -= amount


class _Direction:
    def __init__(
        self, allow: tuple[str, ...], deny: tuple[str, ...], policy: LinkPolicy, now: float
    ) -> None:
        self._allowed = _trie(allow)
        self._denied = _trie(deny)
        self._is_open = "#" in allow and not deny
        self._messages = Allowance(policy.messages_per_s, policy.burst_s, now)
        self._bytes = Allowance(policy.bytes_per_s, policy.burst_s, now)

    def allows(self, topic: str) -> bool:
        if self._is_open:
            return True
        return bool(self._allowed.match(topic)) and not self._denied.match(topic)

    def has_room(self, size: int, now: float) -> bool:
        if not self._messages.has(now) or not self._bytes.has(now):
            return False
        self._messages.spend(1.0)
        self._bytes.spend(size)
        return True


class Gate:
    """The policy of one link with its token buckets, for both directions."""

    def __init__(self, policy: LinkPolicy, now: float) -> None:
        self._payload_bytes_max = policy.payload_bytes_max
        self._out = _Direction(policy.export_allow, policy.export_deny, policy, now)
        self._in = _Direction(policy.import_allow, policy.import_deny, policy, now)

    def refuses_export(self, topic: str, payload_bytes: int) -> str | None:
        """Returns the reason why the policy withholds the message, or None."""
        if payload_bytes > self._payload_bytes_max:
            return "payload too large"
        return None if self._out.allows(topic) else "not exported"

    def refuses_import(self, topic: str, payload_bytes: int) -> str | None:
        if payload_bytes > self._payload_bytes_max:
            return "payload too large"
        return None if self._in.allows(topic) else "not imported"

    def lets_out(self, size: int, now: float) -> bool:
        """Takes room for an outgoing message and returns True, or returns False. Call it once for a
        message: each True is charged."""
        return self._out.has_room(size, now)

    def lets_in(self, size: int, now: float) -> bool:
        return self._in.has_room(size, now)


def _trie(filters: tuple[str, ...]) -> SubscriptionTrie:
    trie = SubscriptionTrie()
    for filter in filters:
        trie.add(filter, None, True)
    return trie
