"""The log lines of a process, on standard error."""

import json
import logging
import sys
import threading
import time
from typing import Final

from holdfast.cli.log_rate import (
    SUMMARY_S,
    TRACEBACK_CHARACTERS_MAX,
    LineRate,
    cut,
    cut_value,
    event_of,
    one_line,
)

LOGGERS: Final = ("holdfast", "uvicorn", "asyncio")
"""The loggers of the broker, the admin port's HTTP server, and the event loop."""
SUMMARY: Final = "lines_suppressed"

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
        """Limit the record's rate, values and length. Returns False to suppress it.

        Summaries are never suppressed: otherwise a busy event could hide that lines are missing.
        """
        message = record.msg if isinstance(record.msg, str) else str(record.msg)
        event = event_of(message)
        if event != SUMMARY:
            with self._lock:
                if not self._rate.admit(event, record.levelno, _now()):
                    self._start_timer()
                    return False
        if isinstance(record.args, tuple):
            record.args = tuple(cut_value(value) for value in record.args)
        record.msg = one_line(record.getMessage())
        record.args = None
        return True

    def summarise(self) -> None:
        """Write the number of suppressed lines."""
        with self._lock:
            self._timer = None
            summaries = self._rate.summaries(_now())
        for each in summaries:
            text = f"{SUMMARY} event={each.event} count={each.lines} seconds={each.seconds:.1f}"
            name = logging.getLevelName(each.level).lower()
            fields = {"name": LOGGERS[0], "levelno": each.level, "levelname": name.upper()}
            self._handler.handle(logging.makeLogRecord({**fields, "msg": text}))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(SUMMARY_S, self.summarise)
            self._timer.daemon = True
            self._timer.start()


class _Formatter(logging.Formatter):
    def formatException(self, ei: object) -> str:
        return cut(super().formatException(ei), TRACEBACK_CHARACTERS_MAX)  # type: ignore[arg-type]


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(formatter)
        self._lines = LineFilter(self)
        self.addFilter(self._lines)

    def close(self) -> None:
        # Called by logging.shutdown at the end of the process.
        self._lines.summarise()
        super().close()


def set_up_logging(level: str, format: str) -> None:
    """Set up the broker's log. `level`: a level's name in lower case. `format`: text or json."""
    formatter: logging.Formatter
    if format == "json":
        formatter = _JsonFormatter()
    else:
        formatter = _Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    handler = _Handler(formatter)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger(LOGGERS[0]).setLevel(level.upper())
    _spare_lookups()


def set_up_plain_logging() -> None:
    """Set up the log of other processes, whose lines also name the module's logger."""
    handler = _Handler(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _spare_lookups()


def _spare_lookups() -> None:
    """Disable look-ups of thread, process and source line, which no line shows."""
    logging._srcfile = None
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False
