"""Describes a row of `holdfast clients`, `sessions`, `groups` or `delayed` in a sentence.

`--json` prints the reply of the admin port in place of it.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.cli.resources.tables import escaped
from holdfast.cli.text import count_text

Reply = dict[str, Any]
NEVER_EXPIRES: Final = 0xFFFF_FFFF
NAMED_MAX: Final = 20
"""The most subscriptions, messages or members of a reply that are named."""


def time_text(time_us: int) -> str:
    """A time in microseconds since 1970, for people."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fields_text(fields: Reply) -> str:
    """The fields of a line of the log."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


def disconnected(reply: Reply) -> str:
    """The end of a client's connection."""
    return f"{escaped(reply['client'])} was disconnected from {reply['node']}; its session stays"


def banned(reply: Reply) -> str:
    """A new ban."""
    until = f"until {time_text(reply['until_us'])}" if reply["until_us"] else "until unban"
    reason = f": {escaped(reply['reason'])}" if reply.get("reason") else ""
    return f"{reply['scope']} {escaped(reply['name'])} is banned {until}{reason}"


def unbanned(reply: Reply) -> str:
    """A lifted ban, or lifted lock-outs."""
    what = ["its ban"] if reply["was_banned"] else []
    if reply["lockouts"]:
        what.append(f"its lock-outs at {', '.join(reply['lockouts'])}")
    name = f"{reply['scope']} {escaped(reply['name'])}"
    return f"{name} may connect again: {' and '.join(what) or 'nothing'} was lifted"


def ended(reply: Reply) -> str:
    """The end of a session."""
    lost = [count_text(reply["subscriptions"], "subscription")]
    waiting = reply["queued"] + reply["inflight"]
    if waiting:
        lost.append(f"{count_text(waiting, 'message')} in memory")
    return f"the session of {escaped(reply['client'])} has ended, with {' and '.join(lost)}"


def moved(reply: Reply) -> str:
    """A session's new position, or the one it would have."""
    least = "" if reply["exact"] else "at least "
    changes = [
        f"{least}{count_text(reply[field], 'message')} {verb}"
        for field, verb in (("skipped", "skipped"), ("repeated", "sent again"))
        if reply[field]
    ]
    would = "would move" if reply["dry_run"] else "has moved"
    return f"{escaped(reply['client'])} {would}: {', '.join(changes) or 'no message is affected'}"


def deleted(reply: Reply) -> str:
    """A deleted queue."""
    return f"the queue {escaped(reply['group'])} was deleted"


def restored(reply: Reply) -> str:
    """The retained messages that were restored, and why the others were not."""
    count, others = reply["restored"], reply["not_restored"]
    text = f"{count_text(count, 'message')} {'was' if count == 1 else 'were'} restored"
    if not others:
        return text
    lines = [f"{escaped(each['topic'])}: {escaped(each['reason'])}" for each in others]
    return "\n".join(
        [f"{text}, {len(others)} {'was' if len(others) == 1 else 'were'} not:", *lines]
    )


def cancelled(reply: Reply) -> str:
    """A delayed message that is not published."""
    due = time_text(reply["due_us"])
    return f"the message to {escaped(reply['topic'])} that was due at {due} is not published"


def session(reply: Reply) -> str:
    """One session in full."""
    return "\n".join(_aligned(_session_lines(reply)))


def _session_lines(reply: Reply) -> Iterator[tuple[str, object]]:
    row = reply["session"]
    yield "client", row["client"]
    yield "user", row["user"] or "-"
    if row["connected"]:
        protocol = f"MQTT {row['protocol']}, listener {row['listener']}"
        yield "connected", f"to {row['node']} from {row['address']} ({protocol})"
        yield "idle", f"{row['idle_s']:g} s, keep alive {row['keep_alive_s']:g} s"
    else:
        yield "away", f"since {time_text(row['away_since_us'])}" if row["away_since_us"] else "yes"
    expiry_s = row["expiry_s"]
    if not expiry_s:
        yield "session", "ends with its connection"
    elif expiry_s == NEVER_EXPIRES:
        yield "session", "never ends"
    elif row["expires_at_us"]:
        yield "session", f"ends at {time_text(row['expires_at_us'])}"
    else:
        yield "session", f"ends {expiry_s} s after its connection"
    yield "queued", count_text(row["queued"], "message")
    yield "inflight", count_text(row["inflight"], "message")
    for each in _named(reply["inflight"]):
        at = f", since {time_text(each['at_us'])}" if each["at_us"] else ""
        place = f"record {each['partition']}/{each['offset']}"
        yield "", f"packet id {each['packet_id']}, QoS {each['qos']}, {place}{at}"
    lag = count_text(row["log_lag"], "record")
    yield "behind", f"{lag}; {reply['needed_bytes']} bytes of the log are kept"
    yield "dropped", f"{count_text(row['dropped'], 'message')} of QoS 0"
    if reply["will_topic"]:
        yield "will", reply["will_topic"]
    yield "filters", row["subscriptions"]
    for each in _named(reply["subscriptions"]):
        yield "", f"QoS {each['qos']}  {each['filter']}"
    if len(reply["subscriptions"]) > NAMED_MAX or len(reply["inflight"]) > NAMED_MAX:
        yield "", "more: --json"


def group(reply: Reply) -> str:
    """One shared group in full."""
    return "\n".join(_aligned(_group_lines(reply)))


def _group_lines(reply: Reply) -> Iterator[tuple[str, object]]:
    row = reply["group"]
    yield "group", row["group"]
    yield "coordinator", row["coordinator"] or "-"
    yield "behind", "-" if row["log_lag"] < 0 else count_text(row["log_lag"], "record")
    oldest = reply["oldest"]
    if oldest is not None:
        place = f"record {oldest['partition']}/{oldest['offset']} of {escaped(oldest['topic'])}"
        yield "oldest", f"{place}, published at {time_text(oldest['at_us'])}"
    else:
        yield "oldest", "-, nothing is unfinished" if reply["oldest_is_known"] else "not found"
    yield "members", f"{row['member_count']}, connected {row['connected_count']}"
    for each in _named(reply["members"]):
        state = f"at {each['node']}" if each["connected"] else "away"
        inflight = f"{count_text(each['inflight'], 'message')} inflight"
        yield "", f"{escaped(each['client'])}  {state}, QoS {each['qos']}, {inflight}"
    if len(reply["members"]) > NAMED_MAX:
        yield "", "more: --json"


def _named(rows: list[Reply]) -> list[Reply]:
    return rows[:NAMED_MAX]


def _aligned(lines: Iterator[tuple[str, object]]) -> Iterator[str]:
    for name, value in lines:
        yield f"{name:<12} {escaped(value)}"


SENTENCES: Final[dict[tuple[str, str], Callable[[Reply], str]]] = {
    ("clients", "disconnect"): disconnected,
    ("sessions", "disconnect"): disconnected,
    ("clients", "ban"): banned,
    ("clients", "unban"): unbanned,
    ("clients", "end"): ended,
    ("sessions", "end"): ended,
    ("clients", "move"): moved,
    ("sessions", "move"): moved,
    ("clients", "show"): session,
    ("sessions", "show"): session,
    ("groups", "show"): group,
    ("groups", "delete"): deleted,
    ("retained", "restore"): restored,
    ("delayed", "cancel"): cancelled,
}
"""The texts, by the command and its action. All others print JSON."""
