"""Notifies systemd, as its sd_notify does, without its library.

`NOTIFY_SOCKET` names the Unix socket of the service manager. Without it nothing is sent.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

logger = logging.getLogger("holdfast")

STATUS_CHARACTERS_MAX: Final = 500
CLOSING_S: Final = 60.0
"""The seconds that the service manager grants after the waits of a stop: `TimeoutStopSec` of
deploy/systemd."""


class ServiceManager:
    """Reports the state of the process, and that its event loop runs."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._watchdog_s = watchdog_s(environ)
        self._timer: asyncio.TimerHandle | None = None

    def report_ready(self, status: str) -> None:
        """Reports the end of the start, or of a reload. `status` is shown by `systemctl status`."""
        self._send("READY=1", f"STATUS={_line(status)}")
        if self._watchdog_s and self._timer is None:
            self._beat()

    async def report_reload(self, reload: Callable[[], Awaitable[object]]) -> None:
        """Carries out a reload, and reports its begin and its end."""
        # Imported here: the supervisor of several processes starts without the broker.
        from holdfast.io.settings.reload import ReloadError

        self._send(*reloading())
        status = "running"
        try:
            await reload()
        except ReloadError as error:
            status = f"running; the last reload failed: {error}"
        self.report_ready(status)

    def report_stop(self, waits_s: float) -> None:
        """Reports the begin of a stop that waits this long before it ends what is open."""
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int((waits_s + CLOSING_S) * 1_000_000)}")

    def _beat(self) -> None:
        self._send("WATCHDOG=1")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._watchdog_s / 2, self._beat)

    def _send(self, *lines: str) -> None:
        send(self._address, *lines)


def reloading() -> tuple[str, str]:
    """The notification of the begin of a reload."""
    return "RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}"


def send(address: str, *lines: str) -> None:
    """Sends a notification. "": nobody waits for it."""
    if not address:
        return
    # An address that begins with @ has no file: the system writes it with a zero byte.
    address = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as made:
            made.setblocking(False)
            made.sendto("\n".join(lines).encode(), address)
    except OSError as error:
        logger.warning("service_manager_not_notified error=%r", str(error))


def watchdog_s(environ: Mapping[str, str]) -> float:
    """The most seconds between two signs of life, or 0. `WATCHDOG_PID` names the process that has
    to send them."""
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    microseconds = environ.get("WATCHDOG_USEC", "")
    is_number = microseconds.isascii() and microseconds.isdecimal() and len(microseconds) < 16
    return int(microseconds) / 1_000_000 if is_number else 0.0


def _line(text: str) -> str:
    return " ".join(text.split())[:STATUS_CHARACTERS_MAX]
