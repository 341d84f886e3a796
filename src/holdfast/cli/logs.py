"""Writes a process's log lines to standard error.

Finds the values of a log line, from its format and its arguments.

Every line of the broker is an event with values: `event name=%r other=%d text='fixed'`. The test
`test_every_line_is_an_event_with_values` enforces that form. Lines of libraries have other forms.
"""

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from math import isfinite
from typing import Final, NamedTuple, TextIO

from holdfast.cli.log_rate import (
    CRITICAL_CHARACTERS_MAX,
    SUMMARY_S,
    TRACEBACK_CHARACTERS_MAX,
    VALUE_CHARACTERS_MAX,
    LineRate,
    cut,
    cut_value,
    event_of,
    one_line,
)

EVENT: Final = re.compile(r"[a-z][a-z0-9_]*")
PAIR: Final = re.compile(r" ([a-z0-9_]+)=('[^']*'|\S+)")
CONVERSION: Final = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
FORMATS_MAX: Final = 1000
"""The most formats whose parts are remembered."""
RESERVED: Final = ("time", "level", "event", "node_id", "message", "exception")
"""The members of a JSON line that are not values of the event. Such a value is named `of_...`."""
LIST_CHARACTERS_MAX: Final = 1024
"""The most characters of a list or table of values. A longer one is cut, as text."""


class Part(NamedTuple):
    """One value of a format."""

    name: str
    template: str
    """The text of the value, with its conversions."""
    first: int
    """The index of the first argument."""
    arguments: int
    """The number of arguments."""


class LineFormat(NamedTuple):
    """The event of a format, and its values. An empty event: the format has another form."""

    event: str
    parts: tuple[Part, ...]


@lru_cache(FORMATS_MAX)
def parse_format(text: str) -> LineFormat:
    """Divides a format into its event and its values."""
    event, blank, rest = text.partition(" ")
    if EVENT.fullmatch(event) is None:
        return LineFormat("", ())
    parts, at, first = [], 0, 0
    rest = blank + rest
    while at < len(rest):
        found = PAIR.match(rest, at)
        if found is None:
            return LineFormat("", ())
        name, template = found.groups()
        count = sum(each != "%%" for each in CONVERSION.findall(template))
        parts.append(Part(name, template, first, count))
        first += count
        at = found.end()
    return LineFormat(event, tuple(parts))


def fields_of(line: LineFormat, args: tuple[object, ...]) -> Iterator[tuple[str, object]]:
    """Yields the values of a line with their names: an argument as it is, all else as text."""
    for part in line.parts:
        values = args[part.first : part.first + part.arguments]
        name = f"of_{part.name}" if part.name in RESERVED else part.name
        if part.arguments == 1 and CONVERSION.fullmatch(part.template):
            yield name, _plain(values[0])
        else:
            template = part.template
            if len(template) > 1 and template[0] == template[-1] == "'":
                template = template[1:-1]
            yield name, template % values


def _plain(value: object) -> object:
    """Returns what JSON can express; anything else as text."""
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, dict):
        value = {str(key): _plain(each) for key, each in value.items()}
    elif isinstance(value, list | tuple | set | frozenset):
        value = [_plain(each) for each in value]
    else:
        value = str(value)
    text = str(value)
    return value if len(text) <= LIST_CHARACTERS_MAX else f"{text[:LIST_CHARACTERS_MAX]}..."


LOGGERS: Final = ("holdfast", "uvicorn", "asyncio", "opentelemetry")
"""The loggers of the broker, the admin port's HTTP server, the event loop and the traces."""
SUMMARY: Final = "lines_suppressed"
PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
"""The least level of each priority of syslog, the most urgent first."""

_now = time.monotonic


class LineFilter(logging.Filter):
    """A handler's filter that turns a record into one limited line, or suppresses it."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._rate = LineRate()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Limits the record's rate, values and length. Returns False to suppress it.

        Summaries are never suppressed: otherwise a busy event could hide that lines are missing.
        """
        message = record.msg if isinstance(record.msg, str) else str(record.msg)
        event = event_of(message)
        if event != SUMMARY:
            with self._lock:
                if not self._rate.admit(event, record.levelno, _now()):
                    self._start_timer()
                    return False
        args: tuple[object, ...] = ()
        if isinstance(record.args, tuple):
            limit = (
                CRITICAL_CHARACTERS_MAX
                if record.levelno >= logging.CRITICAL
                else VALUE_CHARACTERS_MAX
            )
            args = record.args = tuple(cut_value(value, limit) for value in record.args)
        line = parse_format(message)
        if line.event:
            record.event, record.fields = line.event, dict(fields_of(line, args))
        record.msg = one_line(record.getMessage())
        record.args = None
        return True

    def suppresses(self, event: str, level: int) -> bool:
        """Returns whether a line would be suppressed, and counts it then. It need not be made."""
        with self._lock:
            if not self._rate.suppresses(event, level, _now()):
                return False
            self._start_timer()
            return True

    def summarise(self) -> None:
        """Writes the number of suppressed lines."""
        with self._lock:
            self._timer = None
            summaries = self._rate.summaries(_now())
        for each in summaries:
            fields = {
                "name": LOGGERS[0],
                "levelno": each.level,
                "levelname": logging.getLevelName(each.level),
                "msg": f"{SUMMARY} event=%s count=%d seconds=%s",
                "args": (each.event, each.lines, round(each.seconds, 1)),
            }
            self._handler.handle(logging.makeLogRecord(fields))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(SUMMARY_S, self.summarise)
            self._timer.daemon = True
            self._timer.start()


class _Formatter(logging.Formatter):
    def formatException(self, ei: object) -> str:
        return cut(super().formatException(ei), TRACEBACK_CHARACTERS_MAX)  # type: ignore[arg-type]


class _JsonFormatter(_Formatter):
    """An event with its values as members. A line of a library has `message` in place of them."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone()
        fields: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "node_id": self._node_id,
        }
        event = getattr(record, "event", "")
        if event:
            fields |= {"event": event, **getattr(record, "fields", {})}
        else:
            fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        text = json.dumps(fields, ensure_ascii=False)
        # Marks that change the direction of writing are escaped, like control characters.
        return text if text.isprintable() else json.dumps(fields)


class _Prioritised(logging.Formatter):
    """A formatter's lines, each with the priority that journald takes from its beginning. Without
    one, `journalctl -p err` shows nothing of a broker."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        priority = next(each for least, each in PRIORITIES if record.levelno >= least)
        lines = self._inner.format(record).split("\n")
        return "\n".join(f"<{priority}>{line}" for line in lines)


def goes_to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Returns whether a stream is a connection to journald, by its device and inode in
    `JOURNAL_STREAM`. A program that redirects the stream passes the variable on."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(sys.stderr)
        is_journal = goes_to_journal(sys.stderr, os.environ)
        self.setFormatter(_Prioritised(formatter) if is_journal else formatter)
        self.lines = LineFilter(self)
        self.addFilter(self.lines)

    def close(self) -> None:
        # Called by logging.shutdown at the end of the process.
        self.lines.summarise()
        super().close()


def set_up_logging(level: str, format: str, node_id: str = "", process: str = "") -> None:
    """Sets up the broker's log. `level`: a level's name in lower case. `format`: text or json.

    `node_id`: the node's name, a member of each JSON line. `process`: the number of one of several
    processes that write one log, at the end of each line of text.
    """
    from holdfast.io.event_loop.note_ring import NOTE_LINES

    formatter: logging.Formatter
    if format == "json":
        formatter = _JsonFormatter(node_id)
    else:
        form = "%(asctime)s %(levelname)s %(message)s" + (f" process={process}" * (process != ""))
        formatter = _Formatter(form, "%Y-%m-%dT%H:%M:%S%z")
    handler = _Handler(formatter)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger(LOGGERS[0]).setLevel(level.upper())
    NOTE_LINES.suppresses = handler.lines.suppresses
    _spare_lookups()


def set_up_plain_logging() -> None:
    """Sets up the log of other processes, whose lines also name the module's logger."""
    handler = _Handler(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _spare_lookups()


def _spare_lookups() -> None:
    """Disables look-ups of thread, process and source line, which no line shows."""
    logging._srcfile = None
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
