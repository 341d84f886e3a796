"""Checks one topic for broken promises. `judge` lists the promises."""

from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from math import inf
from typing import Final, NamedTuple

from holdfast_lab.topic_history import (
    History,
    JudgedMessage,
    JudgedSubscription,
    Key,
    Receipt,
)

GOODBYE_US: Final = 2_000_000
"""The microseconds after a DISCONNECT in which a fault may lose it. Nothing acknowledges a
DISCONNECT, so a node that fails soon after may not have stored it."""
TEXT_CHARACTERS_MAX: Final = 500
"""The most characters of a finding's text."""
SENT_AGAIN: Final = "sent again by its publisher"
RESENT: Final = "resent with DUP"
OTHER_CONNECTION: Final = "sent to another connection"
DURING_FAULT: Final = "on its way during a fault"
LOST: Final = ("lost", "missed after SUBACK")


class Finding(NamedTuple):
    """A broken promise, or an explained repetition (`kind` is `repetition`)."""

    kind: str
    who: str
    publisher: str | None
    topic: str
    sequence: int | None
    qos: int | None
    """The publisher's QoS."""
    effective_qos: int | None
    """The lower QoS of publisher and subscription, for a repetition."""
    text: str


@dataclass(slots=True)
class TopicCounts:
    """The totals of the messages with one QoS of their publisher."""

    qos: int
    published: int = 0
    sends: int = 0
    confirmed: int = 0
    owed: int = 0
    deliveries: int = 0
    duplicates_explained: int = 0
    duplicates: int = 0
    lost: int = 0
    reordered: int = 0


def count_topic(history: History) -> list[TopicCounts]:
    """Returns the totals of a topic per QoS of the publisher."""
    counts = [TopicCounts(qos) for qos in range(3)]
    for key, message in history.messages.items():
        of_qos = counts[message.qos]
        of_qos.published += 1
        of_qos.sends += message.sends
        of_qos.confirmed += key in history.confirmed_us
    for subscription in history.subscriptions.values():
        for key in due_messages(history, subscription):
            counts[history.messages[key].qos].owed += 1
        for receipt in subscription.receipts:
            if receipt.key in history.messages:
                counts[history.messages[receipt.key].qos].deliveries += 1
    for finding in check_topic(history):
        if finding.qos is not None:
            of_qos = counts[finding.qos]
            of_qos.duplicates_explained += finding.kind == "repetition"
            of_qos.duplicates += finding.kind == "duplicate"
            of_qos.lost += finding.kind in LOST
            of_qos.reordered += finding.kind == "reordered"
    return [of_qos for of_qos in counts if of_qos.published]


def check_topic(history: History) -> Iterator[Finding]:
    """Yields everything that the history of a topic proves."""
    for subscription in history.subscriptions.values():
        yield from _check_missing(history, subscription)
        yield from _check_subscription(history, subscription)
        yield from _check_repetitions(history, subscription)
        if not subscription.is_group:
            yield from _check_order(history, subscription)
    yield from _check_agreement(history)
    yield from _check_owners(history)
    yield from _check_retained(history)


def _finding(
    history: History, kind: str, who: str, key: Key, text: str, effective_qos: int | None = None
) -> Finding:
    message = history.messages.get(key)
    qos = None if message is None else message.qos
    return Finding(kind, who, key[0], history.topic, key[1], qos, effective_qos, text)


def due_messages(history: History, subscription: JudgedSubscription) -> Iterator[Key]:
    """Yields the confirmed messages that must be delivered to a subscription."""
    if not subscription.granted_qos:
        return
    for key in history.confirmed_us:
        message = history.messages.get(key)
        if message is not None and message.qos and subscription.is_due(message):
            yield key


def _check_missing(history: History, subscription: JudgedSubscription) -> Iterator[Finding]:
    lowest: dict[str, int] = {}
    seen = set()
    for receipt in subscription.receipts:
        publisher, sequence = receipt.key
        seen.add(receipt.key)
        lowest[publisher] = min(lowest.get(publisher, sequence), sequence)
    for key in due_messages(history, subscription):
        if key not in seen:
            is_first = lowest.get(key[0], -1) >= key[1]
            took_us = history.confirmed_us[key] - history.messages[key].sent.time_us
            text = f"confirmed {took_us} us after it was sent, not delivered"
            yield _finding(history, LOST[is_first], subscription.name, key, text)


def _check_subscription(history: History, subscription: JudgedSubscription) -> Iterator[Finding]:
    for key in dict.fromkeys(receipt.key for receipt in subscription.receipts):
        withdrawn_us = history.withdrawn_us.get(key)
        if key not in history.messages:
            yield _finding(history, "invented", subscription.name, key, "nobody sent it")
        elif withdrawn_us is not None and not history.was_broken(
            withdrawn_us, withdrawn_us + GOODBYE_US
        ):
            text = "its client had said goodbye"
            yield _finding(history, "will not due", subscription.name, key, text)


def _check_repetitions(history: History, subscription: JudgedSubscription) -> Iterator[Finding]:
    of_key: dict[Key, list[Receipt]] = {}
    for receipt in subscription.receipts:
        known = of_key.setdefault(receipt.key, [])
        known.append(receipt)
        message = history.messages.get(receipt.key)
        if len(known) == 1 or message is None:
            continue
        qos = min(message.qos, subscription.granted_qos or 0)
        reason = "" if qos == 2 else _explanation(history, message, known)
        places = f"to {known[-2].client}, then {receipt.client}"
        text = reason or f"copy {len(known)}, at QoS {qos}: {places}"
        kind = "repetition" if reason else "duplicate"
        yield _finding(history, kind, subscription.name, receipt.key, text, qos)


def _explanation(history: History, message: JudgedMessage, known: list[Receipt]) -> str:
    """Returns the reason that explains the last of these deliveries below QoS 2, or "" for none."""
    before, receipt = known[-2:]
    is_same_client = before.client == receipt.client
    is_same_place = is_same_client and before.connection == receipt.connection
    if not is_same_place and (is_same_client or _was_given_up(history, before, receipt)):
        return RESENT if receipt.dup else OTHER_CONNECTION
    if message.is_will:
        return ""
    place = (receipt.client, receipt.connection)
    there = sum((one.client, one.connection) == place for one in known)
    # The broker recognises a PUBLISH that is sent again at QoS 2.
    copies = message.sends if message.qos == 1 else 1
    if there <= copies and (is_same_client or len(known) <= copies):
        return SENT_AGAIN
    if history.was_broken(message.sent.time_us, history.confirmed_us.get(receipt.key, inf)):
        return DURING_FAULT
    return ""


def _was_given_up(history: History, before: Receipt, receipt: Receipt) -> bool:
    """Returns whether the group may have lost the first delivery before the second.

    The first member lost its connection, or a fault may have lost the record of its delivery.
    """
    end_us = history.ends_us.get((before.client, before.connection), inf)
    return end_us <= receipt.time_us or history.was_broken(before.time_us, receipt.time_us)


def _in_order(history: History, subscription: JudgedSubscription) -> Iterator[Key]:
    """Yields the first deliveries of messages published after the SUBACK.

    An older message is left out. Its copy may have come late, to others too, because the
    subscription was not owed it.
    """
    for key in dict.fromkeys(receipt.key for receipt in subscription.receipts):
        message = history.messages.get(key)
        if message is not None and subscription.is_due(message):
            yield key


def _check_order(history: History, subscription: JudgedSubscription) -> Iterator[Finding]:
    newest: dict[str, int] = {}
    for key in _in_order(history, subscription):
        publisher, sequence = key
        if publisher in history.unordered or history.messages[key].is_will:
            continue
        before = newest.get(publisher, sequence)
        if sequence < before:
            text = f"came after {before}"
            yield _finding(history, "reordered", subscription.name, key, text)
        newest[publisher] = max(before, sequence)


def _check_agreement(history: History) -> Iterator[Finding]:
    before: dict[Key, set[Key]] = {}
    for subscription in history.subscriptions.values():
        if not subscription.is_group:
            for earlier, later in pairwise(_in_order(history, subscription)):
                before.setdefault(later, set()).add(earlier)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        circle = " before ".join(f"{publisher} {sequence}" for publisher, sequence in error.args[1])
        text = f"no order is that of all: {circle}"[:TEXT_CHARACTERS_MAX]
        topic = history.topic
        yield Finding("disagreement", topic, None, topic, None, None, None, text)


def _check_owners(history: History) -> Iterator[Finding]:
    for client, connection, key in history.former:
        accepted_us = history.accepted_us.get(client, [])
        message = history.messages.get(key)
        if (
            message is not None
            and connection < len(accepted_us)
            and message.sent.time_us > accepted_us[connection]
        ):
            text = f"connection {connection} was given what was sent under its successor"
            yield _finding(history, "two owners", client, key, text)


def _check_retained(history: History) -> Iterator[Finding]:
    """Checks the retained messages of a topic with one publisher.

    With several publishers the events do not determine which confirmed message was the last.
    """
    retained = [key for key, message in history.messages.items() if message.retain]
    confirmed = [key[1] for key in retained if key in history.confirmed_us]
    newest = max(confirmed, default=-1)
    for client, key in history.retained:
        found = -1 if key is None else key[1]
        text = ""
        if key is not None and key not in retained:
            text = "it was not to be retained"
        elif found < newest:
            text = f"{newest} was confirmed"
        if text:
            publisher, sequence = key or (None, None)
            yield Finding("retained", client, publisher, history.topic, sequence, None, None, text)
