"""`holdfast top`: rates, slow sessions, publishers and topics of a node, or of all with `--all`.

On a terminal it waits for a node that stops replying, for example because it starts again.

Exit codes: 0 success; 1 the node does not reply, or serves no clients; 2 wrong usage.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.api.views.top import TopDurations, TopPublisher, TopReply, TopSession, TopTopic
from holdfast.cli.cluster.http import AdminPort, add_admin_options
from holdfast.cli.log_rate import cut, one_line
from holdfast.cli.text import table
from holdfast.client.admin_connection import AdminError

EXIT_FAILED: Final = 1
FIRST_S: Final = 1.0
"""The time in seconds between the two requests of the first rates."""
COLUMNS: Final = 120
"""The width where the output is no terminal."""
TOPIC_CHARACTERS_MAX: Final = 60
HOME_AND_CLEAR: Final = "\x1b[H\x1b[J"
NUMBERS: Final = ("messages/s", "bytes/s", "+-", "backlog", "inflight", "dropped")
UNITS: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "top",
        help="rates, slow sessions and busy topics of a node",
        description="Show the rates, slow sessions and busy topics of a node until Ctrl-C.",
    )
    parser.add_argument("--all", action="store_true", help="all nodes of the cluster together")
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print JSON, one line at a time")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between updates (2)"
    )
    parser.add_argument(
        "-n", "--lines", type=int, default=10, metavar="N", help="sessions and topics (10)"
    )
    add_admin_options(parser, "of the node", json=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600 or not 1 <= args.lines <= 100:
        print("holdfast: --interval is 0.1 to 3600, --lines 1 to 100", file=sys.stderr)
        return 2
    try:
        port = AdminPort(args.admin, token_file=args.token_file, ca_file=args.ca_file)
        (_show_all if args.all else _show)(port, args)
    except AdminError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        pass
    return 0


def _ports(port: AdminPort) -> list[AdminPort]:
    """The admin ports of the nodes of a cluster that have clients and are not down."""
    nodes = port.status().nodes
    return [
        port.sibling(each.admin_address)
        for each in nodes
        if each.role != "witness" and each.state != "down" and each.admin_address
    ]


def _show_all(port: AdminPort, args: argparse.Namespace) -> None:
    """Prints all nodes of a cluster, and what they have most of together."""
    in_place = sys.stdout.isatty() and not args.json and not args.once
    before: dict[str, TopReply] = {}
    pause_s = FIRST_S
    while True:
        views: list[TopView] = []
        problems: list[str] = []
        for each in _ports(port):
            try:
                now = _ask(each, args.lines)
            except AdminError as error:
                problems.append(str(error))
                continue
            if now.node in before:
                views.append(with_rates(before[now.node], now))
            before[now.node] = now
        if views or problems:
            if args.json:
                print("\n".join(msgspec.json.encode(each).decode() for each in views), flush=True)
            else:
                size = shutil.get_terminal_size() if in_place else None
                columns = size.columns if size is not None else COLUMNS
                lines = [*cluster_screen(views, args.lines, columns), *problems]
                if size is not None:
                    _draw(lines, size)
                else:
                    print("\n".join(lines), flush=True)
            if args.once:
                return
        time.sleep(pause_s)
        pause_s = args.interval


def _show(port: AdminPort, args: argparse.Namespace) -> None:
    before = _ask(port, args.lines)
    pause_s = FIRST_S
    in_place = sys.stdout.isatty() and not args.json and not args.once
    while True:
        time.sleep(pause_s)
        pause_s = args.interval
        try:
            now = _ask(port, args.lines)
        except AdminError as error:
            if not in_place:
                raise
            _draw([f"{error}", "", "trying again"], shutil.get_terminal_size())
            continue
        shown = with_rates(before, now)
        if args.json:
            print(msgspec.json.encode(shown).decode(), flush=True)
        elif in_place:
            size = shutil.get_terminal_size()
            _draw(list(screen(shown, size.columns)), size)
        else:
            print("\n".join(screen(shown)), flush=True)
        if args.once:
            return
        before = now


def _draw(lines: list[str], size: os.terminal_size) -> None:
    """Replaces the content of the terminal."""
    fitting = [_clip(line, size.columns) for line in lines[: size.lines - 1]]
    print(HOME_AND_CLEAR + "\n".join(fitting), flush=True)


def _ask(port: AdminPort, lines: int) -> TopReply:
    try:
        return msgspec.convert(port.get_json(f"/api/v1/top?limit={lines}"), TopReply)
    except msgspec.ValidationError as error:
        raise AdminError(f"{port.address} replies in another form: {error}") from None


class Quantiles(Struct, frozen=True):
    """Bounds of durations in seconds. None: there were none, or they exceed the last bucket."""

    p50: float | None
    p99: float | None


class TopView(Struct, frozen=True):
    """A reply, and what has changed since the one before."""

    now: TopReply
    rates: dict[str, float]
    """The counters per second."""
    acknowledge_s: Quantiles
    deliver_s: Quantiles
    fdatasync_s: Quantiles


def with_rates(before: TopReply, now: TopReply) -> TopView:
    """Returns the later reply with the changes between the two.

    The counters of a node that has started again begin at 0, so they are the change themselves.
    """
    is_same = before.node == now.node and before.uptime_s <= now.uptime_s
    seconds = max(1e-3, now.time_s - before.time_s if is_same else now.uptime_s)
    old = before.counters if is_same else {}
    rates = {
        name: round((count - old.get(name, 0)) / seconds, 3) for name, count in now.counters.items()
    }
    return TopView(
        now,
        rates,
        *(
            Quantiles(*(_quantile(was if is_same else None, new, share) for share in (0.5, 0.99)))
            for was, new in (
                (before.acknowledge, now.acknowledge),
                (before.deliver, now.deliver),
                (before.fdatasync, now.fdatasync),
            )
        ),
    )


def _quantile(before: TopDurations | None, now: TopDurations, share: float) -> float | None:
    """Returns the bound of the bucket below which this share of the new durations is."""
    old = [0.0] * len(now.counts) if before is None else before.counts
    counts = [new - was for new, was in zip(now.counts, old, strict=True)]
    if not counts or counts[-1] <= 0:
        return None
    for bound, count in zip(now.bounds, counts, strict=True):
        if count >= share * counts[-1]:
            return None if bound == "+Inf" else float(bound)
    return None


def cluster_screen(views: list[TopView], most: int, columns: int = COLUMNS) -> Iterator[str]:
    """Yields the lines for a person about several nodes: two for each, and the tables of all with
    the node of each row."""
    for view in views:
        yield from islice(_head(view), 2)
    # Each replica lists a session that is away. A connected one is listed where it is connected.
    sessions = {
        each.client: (each.backlog, view, _session_row(each))
        for connected in (False, True)
        for view in views
        for each in view.now.slow_sessions
        if each.connected is connected
    }
    for name, rows in (
        ("no slow sessions", list(sessions.values())),
        ("no publishers", [(each.messages_per_s, view, _rate_row("publisher", each.client, each))
                           for view in views for each in view.now.publishers]),
        ("no publishes", [(each.messages_per_s, view, _rate_row("topic", each.topic, each))
                          for view in views for each in view.now.topics]),
    ):  # fmt: skip
        yield ""
        rows.sort(key=lambda row: row[0], reverse=True)
        shown = [{**row, "node": view.now.node} for _, view, row in rows[:most]]
        yield from table(_fitting(shown, columns), NUMBERS) if shown else (name,)


def screen(shown: TopView, columns: int = COLUMNS) -> Iterator[str]:
    """Yields the lines for a person. Names are cut so that the numbers fit into `columns`."""
    now = shown.now
    yield from _head(shown)
    yield ""
    rows = [_session_row(each) for each in now.slow_sessions]
    yield from table(_fitting(rows, columns), NUMBERS) if rows else ("no slow sessions",)
    yield ""
    publishers = [_rate_row("publisher", each.client, each) for each in now.publishers]
    if publishers:
        yield from table(_fitting(publishers, columns), NUMBERS)
        yield ""
    topics = [_rate_row("topic", each.topic, each) for each in now.topics]
    yield from (
        table(_fitting(topics, columns), NUMBERS)
        if topics
        else (now.topics_problem or "no publishes",)
    )


def _session_row(each: TopSession) -> dict[str, str]:
    return {
        "slow session": _name(each.client),
        "user": _name(each.user) or "-",
        "from": each.remote or "away",
        "backlog": _short(each.backlog),
        "inflight": str(each.inflight),
        "dropped": _short(each.dropped),
    }


def _rate_row(title: str, name: str, each: TopTopic | TopPublisher) -> dict[str, str]:
    return {
        title: _name(name),
        "messages/s": _short(each.messages_per_s),
        "bytes/s": _short(each.bytes_per_s),
        "+-": _short(each.error_per_s),
    }


def _head(shown: TopView) -> Iterator[str]:
    """Yields the lines about the node as a whole."""
    now, rates = shown.now, shown.rates
    yield (
        f"{now.node}  up {_time(now.uptime_s)}  connections {now.connections}"
        f"  sessions {now.sessions} (away {now.sessions_away}, behind {now.sessions_behind})"
        f"  backlog {_short(now.backlog_records)}"
    )
    yield (
        f"in {_short(rates['publish_received'])} msg/s {_short(rates['bytes_received'])}B/s"
        f"  out {_short(rates['publish_sent'])} msg/s {_short(rates['bytes_sent'])}B/s"
        f"  connects {_short(rates['connections_opened'])}/s"
        f" refused {_short(rates['connections_refused'])}/s"
    )
    yield "p50/p99 in ms:  " + "  ".join(
        f"{name} {_bound(each.p50)}/{_bound(each.p99)}"
        for name, each in (
            ("acknowledge", shown.acknowledge_s),
            ("deliver", shown.deliver_s),
            ("fdatasync", shown.fdatasync_s),
        )
    )


def _fitting(rows: list[dict[str, str]], columns: int) -> list[dict[str, str]]:
    """Returns the rows with the names in their first column cut to the space beside the others."""
    first, *others = rows[0]
    used = sum(2 + max(len(name), *(len(row[name]) for row in rows)) for name in others)
    most = max(len(first), columns - used)
    return [{**row, first: _clip(row[first], most)} for row in rows]


def _clip(text: str, most: int) -> str:
    """Returns the text with at most so many characters."""
    return text if len(text) <= most else f"{text[: max(0, most - 3)]}..."[:most]


def _name(text: str) -> str:
    """Returns a name of a client or topic, which a stranger may have chosen, for a terminal."""
    return cut(one_line(text), TOPIC_CHARACTERS_MAX)


def _short(value: float) -> str:
    for size, unit in UNITS:
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _bound(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:g}"


def _time(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours:02}:{minutes:02}:{whole:02}"
