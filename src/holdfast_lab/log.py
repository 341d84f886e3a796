"""Writes a test run's events to a file without delaying the measured program."""

import threading
import time
from functools import lru_cache
from pathlib import Path
from socket import gethostname
from typing import Final

import msgspec

from holdfast_lab.events import SCHEMA_VERSION, check_event, check_run

BUFFER_BYTES_MAX: Final = 32 << 20
"""The bytes that may wait for the disk, about 200,000 events. Beyond them `write` waits."""
WRITE_INTERVAL_S: Final = 0.2
"""The seconds between two writes to the file."""
CLOSE_S: Final = 60.0
"""The most seconds that `close` waits for the disk."""

_checked = lru_cache(maxsize=256)(check_event)


class ExperimentLog:
    """The log of one writer's events of one run: one JSON object per line in the file `path`.

        with ExperimentLog("failover-7", path, parameters={"clients": "20"}) as log:
            log.write("published", publisher="p", topic="t", sequence=1, qos=1)

    A thread writes the collected events. No event is dropped: if the disk is too slow, `write`
    waits, and the last event has the number of waits. Any thread may call `write`.
    """

    def __init__(
        self,
        run: str,
        path: Path,
        *,
        writer: str = "",
        host: str = "",
        parameters: dict[str, str] | None = None,
        error_us: int = 0,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
    ) -> None:
        """Opens the file and writes the first events. Raises ValueError and OSError.

        `writer` and `host` default to the name of this machine. `error_us` is the largest
        difference, in microseconds, between this machine's clock and those of the run's other
        hosts.
        """
        check_run(run)
        self.run = run
        self.path = path
        self.host = host or gethostname()
        self.writer = writer or self.host
        self.disturbed = 0
        self._file = path.open("wb", buffering=0)
        self._buffer_bytes_max = buffer_bytes_max
        self._encode = msgspec.json.Encoder().encode
        self._count = 0
        self._lines: list[bytes] = []
        self._bytes = 0
        self._failure: OSError | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="experiment log", daemon=True)
        self._thread.start()
        self.write("run_started", parameters=parameters or {})
        offset_us = time.time_ns() // 1000 - time.monotonic_ns() // 1000
        self.write("clock", offset_us=offset_us, error_us=error_us)

    def __enter__(self) -> "ExperimentLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: str, at_s: float | None = None, **fields: object) -> None:
        """Writes an event.

        `at_s` is its time in monotonic seconds; None means now. Raises ValueError for an event that
        `events` does not define, and OSError if the file cannot be written.
        """
        _checked(event, frozenset(fields))
        at_us = time.monotonic_ns() // 1000 if at_s is None else round(at_s * 1e6)
        with self._changed:
            if self._is_closing:
                raise ValueError("the experiment's log is closed")
            self._append(event, at_us, fields)
            if self._bytes > self._buffer_bytes_max:
                self.disturbed += 1
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._bytes <= self._buffer_bytes_max or self._failure is not None
                )
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Writes the last event and everything before it. Raises OSError."""
        with self._changed:
            if self._is_closing:
                return
            now_us = time.monotonic_ns() // 1000
            self._append("run_ended", now_us, {"disturbed": self.disturbed})
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path}: not written within {CLOSE_S:g} s")
        self._file.close()
        if self._failure is not None:
            raise self._failure

    def _append(self, event: str, at_us: int, fields: dict[str, object]) -> None:
        self._count += 1
        line = self._encode(
            {
                "v": SCHEMA_VERSION,
                "run": self.run,
                "writer": self.writer,
                "n": self._count,
                "host": self.host,
                "at_us": at_us,
                "event": event,
                **fields,
            }
        )
        self._lines.append(line)
        self._bytes += len(line) + 1

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or self._bytes > self._buffer_bytes_max,
                    timeout=WRITE_INTERVAL_S,
                )
                lines, self._lines = self._lines, []
                is_last = self._is_closing
            try:
                self._write_whole(b"".join(line + b"\n" for line in lines))
            except OSError as error:
                self._failure = error
            with self._changed:
                self._bytes -= sum(len(line) + 1 for line in lines)
                self._changed.notify_all()
            if is_last or self._failure is not None:
                return

    def _write_whole(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
