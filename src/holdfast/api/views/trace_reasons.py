"""One sentence about one client and one message."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from holdfast.api.views.history import SessionHistory
from holdfast.api.views.trace import NO_LOCAL, SessionTrace, Status, TracedMessage
from holdfast.log.record import FLAG_QOS_MASK, FLAG_RETAIN
from holdfast.protocol.topics.names import is_shared, split_shared

NOW: Final = ("sent", "waiting", "expired", "too_large", "qos0", "unknown")
"""The statuses that the present state decides."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Asked:
    """A question: a client, a topic and a time."""

    client: str
    topic: str
    time_us: int | None


@dataclass(frozen=True)
class Reason:
    """The answer."""

    status: Status | Literal["no_message"]
    sentence: str
    unknown: list[str] = field(default_factory=list)


def time_text(timestamp_us: int) -> str:
    """A time in UTC with milliseconds."""
    try:
        when = EPOCH + timedelta(microseconds=timestamp_us)
    except OverflowError:
        return f"{timestamp_us} us since 1970"
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{when.microsecond // 1000:03d}Z"


def reason_of(
    asked: Asked,
    message: TracedMessage | None,
    history: SessionHistory | None,
    now: SessionTrace | None,
    *,
    is_known_now: bool,
    is_here: bool = False,
) -> Reason:
    """Decides by what is certain first: the message, the present rights, the cursor, the history.

    `now`: what became of the message by the present state. `is_known_now`: whether the session
    exists now and outlives its connection; `is_here`: whether it exists at all.
    """
    if message is None or history is None:
        when = "now" if asked.time_us is None else time_text(asked.time_us)
        text = (
            f"The log has no message of {asked.topic} within a minute of {when}: none was published"
            " then, or it was of QoS 0 and not logged, or retention has removed it."
        )
        return Reason("no_message", text)
    record = message.record
    place = f"{record.partition}/{record.offset}"
    name = f"message {place} of {asked.topic} ({time_text(record.timestamp_us)})"
    client = asked.client
    if now is not None and now.status == "not_permitted":
        text = f"{client} may not read {asked.topic} by the present rules, so it was not sent"
        return Reason("not_permitted", f"{text} {name}.", ["the rules of that time"])
    if not is_known_now and not (history.filters or history.shared or history.later):
        text = f"The log knows no session of {client} at that time"
        if is_here:
            text += ": its session ends with its connection, and such sessions are not in the log"
        return Reason("unknown", f"{text}, so nothing is known about {name}.")
    if not history.filters:
        shared = _shared(client, name, history, now)
        if shared is not None:
            return shared
    missing = _not_subscribed(client, name, message, history, now, is_known_now=is_known_now)
    if missing is not None:
        return missing
    if not record.flags & FLAG_QOS_MASK:
        text = f"{name[0].upper()}{name[1:]} was published at QoS 0: {client} was sent it if it"
        return Reason("qos0", f"{text} was connected then, and the log has no trace of that.")
    if now is not None and now.status in NOW:
        return Reason(now.status, f"{client} and {name}: {now.text}.")
    return _passed(client, name, message, history, now)


def _shared(
    client: str, name: str, history: SessionHistory, now: SessionTrace | None
) -> Reason | None:
    """The reason if the client was sent the message as a member of a shared group, or not at all.
    None: it was no member, or it subscribed itself, too."""
    if now is not None and now.status in ("sent", "delivered") and split_group(now.filter):
        return Reason(now.status, f"{client} and {name}: {now.text}.")
    if now is not None and not split_group(now.filter):
        return None
    filters = sorted(history.shared) or ([] if now is None else [now.filter])
    if not filters or (history.has_begun and not history.shared):
        return None
    group = split_group(filters[0])
    if history.inflight_us:
        at = time_text(history.inflight_us)
        return Reason("delivered", f"{client} was sent {name} at {at}, as a member of {group}.")
    text = f"{client} was a member of the shared group {group}, of which one member was sent {name}"
    return Reason("shared", f"{text}.", ["which member of the group it was"])


def split_group(filter: str) -> str:
    """The name of the group of a shared filter, or ""."""
    return split_shared(filter)[0] if is_shared(filter) else ""


def _not_subscribed(
    client: str,
    name: str,
    message: TracedMessage,
    history: SessionHistory,
    now: SessionTrace | None,
    *,
    is_known_now: bool,
) -> Reason | None:
    """The reason if the session was not subscribed, or None if it was, or that is unknown."""
    if history.filters:
        return None
    if history.no_local or (now is not None and now.text == NO_LOCAL):
        return Reason("not_subscribed", f"{client} was not sent {name}: {NO_LOCAL}.")
    first = next((each for each in history.later if each[1] != "clean"), None)
    if history.has_begun or (now is not None and now.status == "not_subscribed"):
        text = f"{client} was not subscribed to the topic of {name}"
        if first is not None and first[1] == "subscribe":
            text += f"; it subscribed to {first[2]} at {time_text(first[0])}"
            if message.record.flags & FLAG_RETAIN:
                text += ", and the message is retained, so it may have been sent it then"
        unknown = ["a session of that client that ended with its connection"]
        return Reason("not_subscribed", f"{text}.", unknown)
    if is_known_now and now is None and first is None:
        text = f"{client} is not subscribed to the topic of {name}, and the log has no change since"
        return Reason("not_subscribed", f"{text}.")
    return None


def _passed(
    client: str,
    name: str,
    message: TracedMessage,
    history: SessionHistory,
    now: SessionTrace | None,
) -> Reason:
    ended_us, passed_us = history.ended_us, history.passed_us or history.acknowledged_us
    if history.filters and ended_us and (not passed_us or ended_us <= passed_us):
        text = f"{client} was subscribed, and its session ended at {time_text(ended_us)}"
        return Reason("ended", f"{text} before its cursor had passed {name}.")
    if history.moved_us and not passed_us:
        text = f"An operator moved {client} in the log at {time_text(history.moved_us)}, past"
        return Reason("moved", f"{text} {name}.", ["whether it had received the message before"])
    if message.expires_us and passed_us and passed_us >= message.expires_us:
        text = (
            f"{name[0].upper()}{name[1:]} expired at {time_text(message.expires_us)}, before"
            f" {client} was sent it: its cursor passed it at {time_text(passed_us)}."
        )
        return Reason("expired", text)
    if (now is not None and now.status == "delivered") or passed_us:
        when = f" at {time_text(passed_us)}" if passed_us else ""
        text = f"{client} received {name}: its cursor passed it{when}, and it is not inflight."
        unknown = [] if passed_us else ["when: the log has no cursor record of the session for it"]
        return Reason("delivered", text, unknown)
    text = f"{client} was subscribed at the time of {name}; what became of it is not in the log"
    return Reason("unknown", f"{text} any more.")
