"""Events of a test run: their names, their fields, and their form as records.

An event is one JSON object, the payload of a record on the topic `experiment/<run>/<event>`. Every
event has the fields of `COMMON`. The others are in `FIELDS`, and `EVENTS` lists which event has
which.

A message is identified by its publisher, its topic and its sequence, which the publisher counts per
topic. Times are microseconds of the clock of the event's host, whatever that clock is. The event
`clock` has the offset to microseconds since 1970 UTC, and its largest error.

So the order of two events of one host is known. The order of events of two hosts is known only if
they are further apart than the sum of both errors. The events of one writer are in the order of
`n`.
"""

import re
from dataclasses import dataclass
from typing import Final

SCHEMA_VERSION: Final = 1
TOPIC_ROOT: Final = "experiment"
RUN_PATTERN: Final = "[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}"


@dataclass(frozen=True)
class Field:
    """A field of events, with its type and meaning."""

    name: str
    type: str
    """The type in Spark's DDL."""
    meaning: str


@dataclass(frozen=True)
class Event:
    """A kind of event, with its required and optional fields."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    meaning: str


COMMON: Final = (
    Field("v", "int", "version of this schema: 1"),
    Field("run", "string", "the run: 1 to 100 of A-Z a-z 0-9 _ . -, used once"),
    Field("writer", "string", "writer of the event; all events of a client have the same writer"),
    Field("n", "bigint", "the writer's events, counted from 1 without a gap"),
    Field("host", "string", "host of the clock of `at_us`"),
    Field("at_us", "bigint", "when, in microseconds of that clock"),
    Field("event", "string", "its name"),
)

FIELDS: Final = (
    Field("publisher", "string", "with topic and sequence: the message"),
    Field("topic", "string", "of the message, or of the retained message"),
    Field("sequence", "bigint", "counted by the publisher on that topic"),
    Field("client", "string", "the client of the event; of a group, the member"),
    Field("group", "string", "the shared subscription that the client is a member of"),
    Field("qos", "int", "0, 1 or 2"),
    Field("bytes", "bigint", "of the payload"),
    Field("dup", "boolean", "whether it came with DUP"),
    Field("retain", "boolean", "whether it was published to be retained"),
    Field("will", "boolean", "whether it is a will, which is published with CONNECT"),
    Field("connection", "bigint", "the client's connections, counted from 1"),
    Field("node", "string", "the server"),
    Field("filters", "array<struct<filter:string,qos:int>>", "the filters of the subscription"),
    Field("fault", "bigint", "the run's faults, counted from 1"),
    Field("kind", "string", "of a fault, or of an accusation"),
    Field("nodes", "array<string>", "the nodes that the fault hurt"),
    Field("partition", "int", "of the broker's log"),
    Field("epoch", "bigint", "of the partition's leader"),
    Field("role", "string", "the new role of the node: leader, follower, holder, standby"),
    Field("reason", "int", "reason code of a refusal"),
    Field("text", "string", "a description"),
    Field("offset_us", "bigint", "add it to the host's times to get microseconds since 1970"),
    Field("error_us", "bigint", "the largest error of the offset; 0 if only one host has clients"),
    Field("unordered", "boolean", "its library may let a new message overtake a repeated one"),
    Field("parameters", "map<string,string>", "of the run: see PARAMETERS"),
    Field("disturbed", "bigint", "how often the writer made the measured program wait"),
)

EVENTS: Final = (
    Event("run_started", (), ("parameters",), "each writer's first event"),
    Event("clock", ("offset_us", "error_us"), (), "about the event's host; the newest one counts"),
    Event("client", ("client",), ("unordered",), "properties of a client"),
    Event("connected", ("client",), ("node",), "a server accepted the client's connection"),
    Event(
        "disconnected",
        ("client",),
        ("connection",),
        "the client detected the end of its connection",
    ),
    Event("subscribing", ("client", "filters"), ("group",), "SUBSCRIBE, before it is answered"),
    Event("subscribed", ("client",), (), "SUBACK: messages published from now on are owed"),
    Event(
        "published",
        ("publisher", "topic", "sequence", "qos"),
        ("retain", "will", "bytes"),
        "PUBLISH left the client; again for every repetition",
    ),
    Event(
        "confirmed",
        ("publisher", "topic", "sequence"),
        (),
        "PUBACK or PUBREC; of a will, the connection that was lost",
    ),
    Event("refused", ("publisher", "topic", "sequence"), ("reason",), "answered with an error"),
    Event(
        "withdrawn",
        ("publisher", "topic", "sequence"),
        (),
        "a will whose client said goodbye, and whose server closed the connection upon it",
    ),
    Event(
        "delivered",
        ("client", "publisher", "topic", "sequence", "connection"),
        ("dup", "bytes"),
        "to the application: at QoS 2 without the retransmissions",
    ),
    Event(
        "delivered_former",
        ("client", "publisher", "topic", "sequence", "connection"),
        (),
        "on a connection whose client has another one since",
    ),
    Event(
        "retained_found",
        ("client", "topic"),
        ("publisher", "sequence"),
        "the retained message that a new subscriber received after the run; no publisher: none",
    ),
    Event("fault_injected", ("fault", "kind"), ("nodes",), "something is broken from now on"),
    Event("fault_healed", ("fault",), (), "all nodes are in sync again"),
    Event(
        "role_changed", ("node", "role"), ("partition", "epoch"), "a node began or stopped leading"
    ),
    Event("accused", ("client", "kind"), ("text",), "an error that only the client can see"),
    Event("run_ended", (), ("disturbed",), "each writer's last event"),
)

PARAMETERS: Final = {
    "name": "the subject of the test, in a few words",
    "clients": "number of clients",
    "rate_per_s": "messages a second that all publishers together try to send",
    "qos": "of the publishers; `mixed` where they differ",
    "payload_bytes": "of a message",
    "partitions": "of the broker's log: needed for the downtime of each partition",
    "nodes": "number of nodes",
    "fault_plan": "the faults, separated by commas",
    "seed": "the seed with which the run can be repeated",
    "software": "broker and version",
}

BY_NAME: Final = {event.name: event for event in EVENTS}
_ALLOWED: Final = {event.name: frozenset(event.required + event.optional) for event in EVENTS}
_REQUIRED: Final = {event.name: frozenset(event.required) for event in EVENTS}


def check_run(run: str) -> None:
    """Checks the name of a run. Raises ValueError."""
    if not re.fullmatch(RUN_PATTERN, run):
        raise ValueError(f"run {run!r}: 1 to 100 of the characters A-Z a-z 0-9 _ . -")


def check_event(event: str, fields: frozenset[str]) -> None:
    """Checks that an event has all required fields, and no unknown field beside the common ones.

    Raises ValueError.
    """
    if event not in _ALLOWED:
        raise ValueError(f"event {event!r}: one of {', '.join(sorted(_ALLOWED))}")
    if unknown := fields - _ALLOWED[event]:
        raise ValueError(f"event {event!r} has no field {', '.join(sorted(unknown))}")
    if lacking := _REQUIRED[event] - fields:
        raise ValueError(f"event {event!r} lacks {', '.join(sorted(lacking))}")


def topic_of(run: str, event: str) -> str:
    """Returns the topic of an event's record."""
    return f"{TOPIC_ROOT}/{run}/{event}"


def ddl() -> str:
    """Returns the columns of an event for Spark."""
    return ", ".join(f"`{field.name}` {field.type}" for field in (*COMMON, *FIELDS))
