"""Counts sessions and reads certificates' dates regularly, for metrics.

A census and the dates cost too much for each scrape. They are taken in the background: the census
in slices of the event loop, the dates in a thread.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.api.process import ServedProcess
from holdfast.config.schema import Config
from holdfast.io.settings.security_files import readable_by_everyone
from holdfast.node.session.census import SessionCensus
from holdfast.security.certificate_times import ends_of, lists_valid_until

CENSUS_S: Final = 5.0
"""The shortest time in seconds between two censuses."""
CENSUS_SHARE: Final = 100
"""A census takes at most one part in this many of the time, so with many sessions it is rarer."""
SLICE_SESSIONS: Final = 500
NEAR_END_S: Final = 30 * 86_400.0
"""The seconds before the end of a certificate from which the check, a start and a reload warn."""
logger = logging.getLogger("holdfast")


class CertificateDate(NamedTuple):
    """The end of validity of one file."""

    door: str
    """The listener's address, `admin`, `peers` or `federation`; in texts, all of the file."""
    file: str
    """`certificate`, `ca` or `crl`."""
    valid_until: float
    """Seconds since 1970."""
    path: str
    usable_until: float
    """The time from which no connection with the file succeeds."""


class Census:
    """The latest counts of one process. Without a first one, all are 0."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._config: Config | None = None
        self.sessions = SessionCensus([], [])
        self.certificates: list[CertificateDate] = []

    async def run(self) -> None:
        """Counts again and again, until cancelled."""
        while True:
            spent_s = await self.take()
            if self._server.config is not self._config:
                # After the start and after each reload.
                config = self._server.config
                self.certificates = await asyncio.to_thread(dates_of, config)
                self._config = config
            await asyncio.sleep(max(CENSUS_S, spent_s * CENSUS_SHARE))

    async def take(self) -> float:
        """Counts all sessions now. Returns the seconds that the loop was busy with it."""
        broker, cluster = self._server.broker, self._server.cluster
        if broker is None or cluster is None:
            return 0.0
        began = time.perf_counter()
        state = broker.node.state
        sessions = chain(state.list_sessions(), cluster.replicated_sessions())
        census = SessionCensus(sessions, state.journal.high_watermark)
        spent_s = time.perf_counter() - began
        has_more = True
        while has_more:
            began = time.perf_counter()
            has_more = census.step(SLICE_SESSIONS)
            spent_s += time.perf_counter() - began
            await asyncio.sleep(0)
        self.sessions = census
        return spent_s


def dates_of(config: Config) -> list[CertificateDate]:
    """Returns the dates of the configured certificate files. Blocks.

    A file that cannot be read has none: the start or the reload has reported it.
    """
    files = [
        (
            f"{each.bind}:{each.port}",
            {"certificate": each.certificate, "ca": each.client_ca, "crl": each.crl},
        )
        for each in config.listeners
    ]
    if config.admin.certificate:
        files.append(("admin", {"certificate": config.admin.certificate}))
    cluster, federation = config.cluster, config.federation
    if cluster.peer_bind:
        files.append(("peers", {"certificate": cluster.certificate, "ca": cluster.ca}))
    if federation is not None:
        files.append(("federation", {"certificate": federation.certificate, "ca": federation.ca}))
    dates = []
    for door, names in files:
        for file, name in names.items():
            if name:
                try:
                    pem = Path(name).read_bytes()
                    ends = [lists_valid_until(pem)] if file == "crl" else ends_of(pem)
                except (OSError, ValueError):
                    continue
                # One signer of several may end; the chain of a certificate may not.
                last = max(ends) if file == "ca" else min(ends)
                dates.append(CertificateDate(door, file, min(ends), name, last))
    return dates


def ended(dates: Iterable[CertificateDate], now: float) -> list[str]:
    """Returns a line for each certificate that is of no use any more. Lists are not among them:
    see `holdfast.io.settings.security_files`."""
    return [
        f"{each.path}: the {each.file} of {each.door} ended at {_day(each.usable_until)}: no TLS"
        " connection succeeds"
        for each in _by_file(dates)
        if each.file != "crl" and each.usable_until <= now
    ]


def _by_file(dates: Iterable[CertificateDate]) -> list[CertificateDate]:
    """The dates of each file once, with all its doors."""
    found: dict[tuple[str, str], CertificateDate] = {}
    for each in dates:
        known = found.get((each.path, each.file))
        joined = each if known is None else known._replace(door=f"{known.door}, {each.door}")
        found[each.path, each.file] = joined
    return list(found.values())


def near_end(dates: Iterable[CertificateDate], now: float) -> list[str]:
    """Returns a line for each certificate that ends within NEAR_END_S, or one of whose signers has
    ended."""
    return [
        f"{each.path}: the {each.file} of {each.door} ends at {_day(each.valid_until)}"
        for each in _by_file(dates)
        if each.file != "crl" and each.usable_until > now >= each.valid_until - NEAR_END_S
    ]


def file_warnings(config: Config) -> list[str]:
    """Returns a line for each file that a start can use, and warns of. Blocks."""
    return near_end(dates_of(config), time.time()) + [
        f"{path}: every user of this machine may read it: chmod o-r {path}"
        for path in readable_by_everyone(config)
    ]


def report_files(config: Config) -> None:
    """Logs the certificates of all doors that have ended or are about to, and the files with
    secrets that everybody may read. Blocks.

    The node serves nevertheless: other listeners may do, and a start that is refused would turn a
    restart into an outage.
    """
    dates, now = dates_of(config), time.time()
    for text in ended(dates, now):
        logger.error("certificate_expired text=%r", text)
    for text in near_end(dates, now):
        logger.warning("certificate_expires text=%r", text)
    for path in readable_by_everyone(config):
        logger.warning("readable_by_everyone file=%r text='take the right from others'", path)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
