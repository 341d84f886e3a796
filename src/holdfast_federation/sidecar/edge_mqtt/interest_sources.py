"""Finds clients' interest at brokers that do not report subscriptions.

Clients, or programs that know them, publish statements of interest on topics of the broker. Lines
of the broker's log are another source. Each statement is valid for a limited time, and the interest
is the union of all. Any client that may publish to `federator/#` can make statements. Malformed
ones are refused and counted, and the effect of each is bounded.

Pure: `now` is in seconds and never decreases.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from holdfast.protocol.topics.names import (
    SHARE_PREFIX,
    InvalidFilter,
    check_filter,
    has_wildcard,
    is_shared,
    split_shared,
)
from holdfast_federation.core.routing.interest import may_leave
from holdfast_federation.sidecar.edge_mqtt.subscriptions import within

INTEREST_TOPIC: Final = "federator/interest"
BEACON_PREFIX: Final = "federator/beacon/"
LOG_SUBSCRIBE: Final = "$SYS/broker/log/M/subscribe"
LOG_UNSUBSCRIBE: Final = "$SYS/broker/log/M/unsubscribe"
LOG_NOTICE: Final = "$SYS/broker/log/N"

WORD_BYTES_MAX: Final = 65_536
WORD_FILTERS_MAX: Final = 1_000
"""The most filters in one message on INTEREST_TOPIC."""
HELD_MAX: Final = 20_000
"""The most filters, counted once per owner. Further ones are refused until some expire."""
TTL_MAX_S: Final = 7 * 86_400.0
BEACONS_PER_TTL: Final = 3
CLIENTS_MAX: Final = 20_000
"""The most clients whose session is known to end with the connection."""

STATIC: Final = "static"
BEACON: Final = "beacon"
WORD: Final = "interest"
LOG: Final = "log"

_LINE_SUBSCRIBE: Final = re.compile(r"\d+: (.+?) [012] (.+)")
_LINE_UNSUBSCRIBE: Final = re.compile(r"\d+: (.+?) (.+)")
_LINE_CONNECTED: Final = re.compile(r"\d+: New client connected from .+? as (.+) \(p[12], c1, .*")
_LINE_GONE: Final = re.compile(
    r"\d+: (?:Client (.+?) (?:disconnected|closed its connection|has exceeded timeout).*"
    r"|Socket error on client (.+), disconnecting\.)"
)


class BadWord(ValueError):
    """A statement does not have the form of its topic. The text says what to send."""


class Word(msgspec.Struct, forbid_unknown_fields=True):
    """A statement on INTEREST_TOPIC: a client's filters and their validity in seconds.

    A `ttl` of 0 withdraws them.
    """

    filters: list[str]
    ttl: float
    client: str = ""


class HeldInterest(NamedTuple):
    """The key of one owner's interest in one filter."""

    source: str
    owner: str
    """The client. Several owners of one filter end their interest independently."""
    filter: str


@dataclass(frozen=True)
class SourceSettings:
    """The enabled sources of interest, and the validity of their statements."""

    beacon_ttl_s: float = 30.0
    """The validity of a beacon in seconds: three intervals between beacons."""
    log_ttl_s: float = 86_400.0
    """The validity in seconds of a subscription in the log unless the log ends it."""
    hears_beacons: bool = True
    hears_words: bool = True
    reads_log: bool = True

    def topics(self) -> list[str]:
        found = [f"{BEACON_PREFIX}#"] if self.hears_beacons else []
        found += [INTEREST_TOPIC] if self.hears_words else []
        return found + ([LOG_SUBSCRIBE, LOG_UNSUBSCRIBE, LOG_NOTICE] if self.reads_log else [])


class InterestSources:
    """All current statements of interest, and the changes not reported yet."""

    def __init__(
        self,
        settings: SourceSettings,
        static: Iterable[str],
        allowed: Iterable[str] = ("#",),
    ) -> None:
        """`allowed`: filters that may be imported. Raises `InvalidFilter` for a bad static
        filter."""
        self._settings = settings
        self._allowed = tuple(allowed)
        self.own_clients: frozenset[str] = frozenset()
        """The federator's own client ids. Their subscriptions in the log are no interest."""
        self._expiries: dict[HeldInterest, float] = {}
        self._ttls: dict[HeldInterest, float] = {}
        self.is_longer = False
        """Whether a statement is valid for longer than at the last `snapshot`, renewals aside."""
        self._counts: Counter[str] = Counter()
        self._reported: set[str] = set()
        self._touched: set[str] = set()
        # Clients whose subscriptions end with their connection.
        self._transient: set[str] = set()
        self.refused: Counter[str] = Counter()
        """Refused statements by source."""
        for filter in static:
            check_filter(filter)
            self._extend(HeldInterest(STATIC, "", filter), float("inf"))

    def __len__(self) -> int:
        return len(self._expiries)

    @property
    def filter_count(self) -> int:
        """The number of different filters."""
        return len(self._reported)

    def topics(self) -> list[str]:
        """Returns the topics to subscribe to."""
        return self._settings.topics()

    def handle(self, topic: str, payload: bytes, now: float) -> None:
        """Applies a message on one of the topics. Raises `BadWord`, counted, if malformed."""
        source = BEACON if topic.startswith(BEACON_PREFIX) else WORD
        if topic.startswith("$"):
            source = LOG
        try:
            if len(payload) > WORD_BYTES_MAX:
                raise BadWord(f"{len(payload)} bytes, at most {WORD_BYTES_MAX} are read")
            if source == BEACON:
                self._handle_beacon(topic.removeprefix(BEACON_PREFIX), now)
            elif source == WORD:
                self._handle_word(payload, now)
            else:
                self._handle_line(topic, payload.decode("utf-8", "replace"), now)
        except (BadWord, InvalidFilter) as error:
            self.refused[source] += 1
            raise BadWord(str(error)) from None

    def expire(self, now: float) -> None:
        """Drops the statements that are no longer valid."""
        for held in [held for held, until in self._expiries.items() if until <= now]:
            self._drop(held)

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Returns filters that began to be wanted, and those that ended, since the last call."""
        added = [one for one in self._touched if self._counts[one] and one not in self._reported]
        removed = [one for one in self._touched if not self._counts[one] and one in self._reported]
        self._reported.update(added)
        self._reported.difference_update(removed)
        for filter in removed:
            del self._counts[filter]
        self._touched.clear()
        return sorted(added), sorted(removed)

    def snapshot(self, now: float) -> list[tuple[str, str, str, float]]:
        """Returns the statements with the seconds left of each, for `restore` after a restart."""
        self.is_longer = False
        return [
            (*held, until - now)
            for held, until in self._expiries.items()
            if until > now and held.source != STATIC
        ]

    def restore(self, entries: Iterable[tuple[str, str, str, float]], now: float) -> None:
        """Adds statements saved before a restart. A wrong clock cannot extend them beyond
        TTL_MAX_S."""
        for source, owner, filter, left_s in entries:
            self._extend(HeldInterest(source, owner, filter), now + min(left_s, TTL_MAX_S))

    def _handle_beacon(self, topic: str, now: float) -> None:
        if not topic or has_wildcard(topic):
            raise BadWord(f"a beacon's topic is {BEACON_PREFIX} and the topic that is wanted")
        self._renew(HeldInterest(BEACON, "", topic), self._settings.beacon_ttl_s, now)

    def _handle_word(self, payload: bytes, now: float) -> None:
        try:
            word = msgspec.json.decode(payload, type=Word)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadWord(f'{error}: send {{"filters": ["a/#"], "ttl": 60}}') from None
        if not 0 <= word.ttl <= TTL_MAX_S:
            raise BadWord(f"a ttl of {word.ttl:g}: from 0 to {TTL_MAX_S:g} seconds")
        if len(word.filters) > WORD_FILTERS_MAX:
            raise BadWord(f"{len(word.filters)} filters, at most {WORD_FILTERS_MAX} in a message")
        for filter in word.filters:
            check_filter(filter)
        for filter in word.filters:
            held = HeldInterest(WORD, word.client, filter)
            if word.ttl:
                self._renew(held, word.ttl, now)
            else:
                self._drop(held)

    def _handle_line(self, topic: str, line: str, now: float) -> None:
        if topic == LOG_NOTICE:
            self._handle_notice(line)
            return
        is_begun = topic == LOG_SUBSCRIBE
        found = (_LINE_SUBSCRIBE if is_begun else _LINE_UNSUBSCRIBE).fullmatch(line)
        if found is None:
            raise BadWord(f"not a line that Mosquitto writes: {line[:200]!r}")
        client, filter = found.groups()
        check_filter(filter)
        plain = split_shared(filter)[1] if is_shared(filter) else filter
        if client in self.own_clients or not may_leave(plain):
            return
        held = HeldInterest(LOG, client, filter)
        if is_begun:
            self._renew(held, self._settings.log_ttl_s, now)
        else:
            self._drop(held)

    def _handle_notice(self, line: str) -> None:
        connected = _LINE_CONNECTED.fullmatch(line)
        if connected is not None:
            if len(self._transient) < CLIENTS_MAX:
                self._transient.add(connected[1])
            return
        gone = _LINE_GONE.fullmatch(line)
        if gone is None:
            return
        client = gone[1] or gone[2]
        if client in self._transient:
            self._transient.discard(client)
            for held in [
                one for one in self._expiries if one.source == LOG and one.owner == client
            ]:
                self._drop(held)

    def _renew(self, held: HeldInterest, ttl_s: float, now: float) -> None:
        if held not in self._expiries and len(self._expiries) >= HELD_MAX:
            raise BadWord(f"{HELD_MAX} filters are wanted already, and more are not taken")
        self.is_longer |= ttl_s > self._ttls.get(held, 0.0)
        self._ttls[held] = ttl_s
        self._extend(held, now + ttl_s)

    def _extend(self, held: HeldInterest, until: float) -> None:
        if held not in self._expiries:
            self._count(held.filter, 1)
        self._expiries[held] = until

    def _drop(self, held: HeldInterest) -> None:
        self._ttls.pop(held, None)
        if self._expiries.pop(held, None) is not None:
            self._count(held.filter, -1)

    def _count(self, filter: str, by: int) -> None:
        group, plain = split_shared(filter) if is_shared(filter) else ("", filter)
        prefix = f"{SHARE_PREFIX}{group}/" if group else ""
        for part in within((plain,), self._allowed):
            if may_leave(part):
                self._counts[prefix + part] += by
                self._touched.add(prefix + part)
