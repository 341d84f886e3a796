"""Keeps the edge's subscriptions at the broker equal to the interest of other members.

- `_subscribed` has every subscription of the edge that the broker may have. A filter is saved
  before it is subscribed to, and removed after it was unsubscribed from. In the opposite order, a
  crash would leave a subscription that no process ever ends.
- New filters are subscribed to before the filters that covered them are removed, so no message is
  missed in between. Copies in that time are recognised by subscription identifiers, which MQTT 3
  does not have.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from holdfast.client.client import Client
from holdfast.client.errors import SubscribeRefused
from holdfast.client.options import LEVEL_5
from holdfast.protocol.mqtt import properties as pr
from holdfast.protocol.mqtt.packets import SubscriptionRequest
from holdfast.protocol.topics.intersection import intersection
from holdfast.protocol.topics.names import has_wildcard
from holdfast.protocol.topics.trie import SubscriptionTrie
from holdfast_federation.core.routing.interest import generalised
from holdfast_federation.sidecar.edge_mqtt.exports import Exports, Replays

FILTERS_MAX: Final = 10_000
WILDCARDS_MAX: Final = 256
"""The most filters with wildcards; each is compared with each.

More are cut to fewer levels, ending in `#`.
"""


def covers(one: str, other: str) -> bool:
    """Returns whether `one` matches everything that `other` matches."""
    return intersection(one, other) == other


def overlaps(one: str, other: str) -> bool:
    return intersection(one, other) is not None


def joined(one: str, other: str) -> str:
    """Returns a filter that matches everything either one does, and possibly more."""
    left = one.split("/")
    right = other.split("/")
    levels: list[str] = []
    for index in range(max(len(left), len(right))):
        if index >= len(left) or index >= len(right) or "#" in (left[index], right[index]):
            return "/".join([*levels, "#"])
        levels.append(left[index] if left[index] == right[index] else "+")
    return "/".join(levels)


def within(filters: Iterable[str], allowed: Iterable[str]) -> set[str]:
    """Returns the allowed part of the filters."""
    bounds = set(allowed)
    if "#" in bounds:
        return set(filters)
    found = (intersection(filter, bound) for filter in filters for bound in bounds)
    return {filter for filter in found if filter is not None}


def subscription_set(wanted: Iterable[str]) -> frozenset[str]:
    """Returns at most FILTERS_MAX disjoint filters that match everything wanted."""
    filters = generalised(wanted, FILTERS_MAX)
    wild = generalised((one for one in filters if has_wildcard(one)), WILDCARDS_MAX)
    disjoint: list[str] = []
    for filter in sorted(wild):
        grown = filter
        while (met := next((one for one in disjoint if overlaps(one, grown)), None)) is not None:
            disjoint.remove(met)
            grown = (
                grown if covers(grown, met) else met if covers(met, grown) else joined(met, grown)
            )
        disjoint.append(grown)
    trie = SubscriptionTrie()
    for filter in disjoint:
        trie.add(filter, None, True)
    names = (one for one in filters if not has_wildcard(one) and not trie.match(one))
    return frozenset((*disjoint, *names))


logger = logging.getLogger("holdfast.federator")

PACKET_FILTERS_MAX: Final = 100
"""The most filters in one SUBSCRIBE or UNSUBSCRIBE."""
NUMBER_MAX: Final = 268_435_455
"""The largest subscription identifier that MQTT 5 allows."""


class EdgeSubscriptions:
    """Moves the broker's subscriptions towards the wanted set, one change at a time."""

    def __init__(
        self,
        held: Mapping[str, int],
        allowed: tuple[str, ...],
        exports: Exports,
        fence: Callable[[], Awaitable[None]],
        save: Callable[[Mapping[str, int]], Awaitable[None]],
    ) -> None:
        """`subscribed`: the filters of an earlier process with their identifiers, 0 for none.
        `save`: returns when its argument is on disk."""
        self._subscribed = dict(held)
        self._allowed = allowed
        self._exports = exports
        self._fence = fence
        self._save = save
        self._wanted: frozenset[str] | None = None
        # The filters of this client. The client subscribes to them again after a session loss.
        self._granted: set[str] = set()
        self._is_first_round = True
        self.refused: set[str] = set()
        """Filters that the broker has refused since the connection was made."""
        exports.allow(frozenset(held))

    @property
    def is_waiting(self) -> bool:
        """Whether the host has not reported what is wanted."""
        return self._wanted is None

    def subscribed(self) -> list[str]:
        return sorted(self._subscribed)

    def set_wanted_filters(self, filters: frozenset[str]) -> None:
        """Replaces the wanted filters. Until the first call the subscriptions stay unchanged. The
        broker may have some for the new filters already, of an earlier process."""
        self._wanted = filters
        self._exports.allow(frozenset((*within(filters, self._allowed), *self._subscribed)))

    def new_client(self) -> None:
        self._granted.clear()
        # An earlier process may have crashed after saving and before subscribing.
        self._is_first_round = True

    def connected(self, session_present: bool) -> None:
        """Notes a new connection. Without the session, only this client's filters are still
        valid."""
        self.refused.clear()
        if not session_present:
            self._subscribed = {
                one: held for one, held in self._subscribed.items() if one in self._granted
            }

    async def update(self, client: Client) -> None:
        """Subscribes and unsubscribes as wanted. Raises `ClientError` if the connection fails."""
        if self._wanted is None:
            return
        exact = within(self._wanted, self._allowed)
        wanted = subscription_set(exact) - self.refused
        before = frozenset(self._subscribed)
        added = sorted(wanted if self._is_first_round else wanted - before)
        removed = sorted(before - wanted)
        # Until a filter is unsubscribed from, its messages may match another subscriber.
        self._exports.allow(frozenset(exact | set(removed)))
        if added or removed:
            await self._change(client, added, removed)
            logger.info("federation_edge_subscribed filters=%d", len(self._subscribed))
        self._is_first_round = False
        self._exports.allow(frozenset(exact))

    async def _change(self, client: Client, added: list[str], removed: list[str]) -> None:
        is_meeting = any(overlaps(one, other) for one in added for other in removed)
        settles = bool(added) and self._exports.replays is Replays.AT_FIRST
        self._exports.is_changing = is_meeting
        try:
            if added:
                await self._add(client, added)
            if settles or is_meeting:
                await self._fence()
                self._exports.is_settling = False
            if removed:
                await self._remove(client, removed)
            if is_meeting:
                await self._fence()
        finally:
            self._exports.is_changing = False

    async def _add(self, client: Client, filters: list[str]) -> None:
        number = self._new_number(client)
        groups: dict[int, list[str]] = {}
        for filter in filters:
            groups.setdefault(self._subscribed.setdefault(filter, number), []).append(filter)
        await self._save(self._subscribed)
        if self._exports.replays is Replays.AT_FIRST:
            self._exports.is_settling = True
        for identifier, group in groups.items():
            for at in range(0, len(group), PACKET_FILTERS_MAX):
                await self._subscribe(client, group[at : at + PACKET_FILTERS_MAX], identifier)

    async def _subscribe(self, client: Client, filters: list[str], identifier: int) -> None:
        requests = [SubscriptionRequest(filter, 2) for filter in filters]
        if client.core.options.level == LEVEL_5:
            # No Local and Retain As Published; Retain Handling 2 omits messages already retained.
            requests = [SubscriptionRequest(filter, 2, True, True, 2) for filter in filters]
        try:
            await client.subscribe(*requests, subscription_id=identifier)
        except SubscribeRefused as error:
            codes = error.reasons
            refused = [one for one, code in zip(filters, codes, strict=True) if code >= 0x80]
            self.refused.update(refused)
            for filter in refused:
                self._subscribed.pop(filter, None)
            logger.warning(
                "federation_subscribe_refused error=%r text='allow it in the access list of the"
                " broker'", str(error),
            )  # fmt: skip
        self._granted.update(one for one in filters if one not in self.refused)

    async def _remove(self, client: Client, filters: list[str]) -> None:
        for at in range(0, len(filters), PACKET_FILTERS_MAX):
            group = filters[at : at + PACKET_FILTERS_MAX]
            try:
                await client.unsubscribe(*group)
            except SubscribeRefused as error:
                logger.warning("federation_unsubscribe_refused error=%r", str(error))
            for filter in group:
                self._subscribed.pop(filter, None)
                self._granted.discard(filter)
        await self._save(self._subscribed)

    def _new_number(self, client: Client) -> int:
        """Returns an identifier for filters that are added together. These never overlap."""
        available = client.connack_properties.get(pr.SUBSCRIPTION_IDENTIFIER_AVAILABLE, 1)
        if client.core.options.level < LEVEL_5 or not available:
            return 0
        return max(self._subscribed.values(), default=0) % NUMBER_MAX + 1
