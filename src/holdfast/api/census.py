"""The regular census of sessions, and the dates of certificates, for metrics and `holdfast top`.

Both cost too much for each scrape. They are taken in the background: the census in slices of the
event loop, the dates in a thread.
"""

import asyncio
import time
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.api.process import ServedProcess
from holdfast.broker.session.census import SessionCensus
from holdfast.config.schema import Config
from holdfast.security.certificate_times import lists_valid_until, valid_until

CENSUS_S: Final = 5.0
"""The shortest time in seconds between two censuses."""
CENSUS_SHARE: Final = 100
"""A census takes at most one part in this many of the time, so with many sessions it is rarer."""
SLICE_SESSIONS: Final = 500


class CertificateDate(NamedTuple):
    """The end of validity of one file."""

    door: str
    """The listener's address, `admin`, `peers` or `federation`."""
    file: str
    """`certificate`, `ca` or `crl`."""
    valid_until: float
    """Seconds since 1970."""


class Census:
    """The latest counts of one process. Without a first one, all are 0."""

    def __init__(self, server: ServedProcess) -> None:
        self._server = server
        self._config: Config | None = None
        self.sessions = SessionCensus([], [])
        self.certificates: list[CertificateDate] = []

    async def run(self) -> None:
        """Count again and again, until cancelled."""
        while True:
            spent_s = await self.take()
            if self._server.config is not self._config:
                # After the start and after each reload.
                config = self._server.config
                self.certificates = await asyncio.to_thread(dates_of, config)
                self._config = config
            await asyncio.sleep(max(CENSUS_S, spent_s * CENSUS_SHARE))

    async def take(self) -> float:
        """Count all sessions now. Returns the seconds that the loop was busy with it."""
        broker, cluster = self._server.broker, self._server.cluster
        if broker is None:
            return 0.0
        began = time.perf_counter()
        state = broker.node.state
        sessions = list(state.sessions.values())
        if cluster is not None:
            sessions += cluster.replicated_sessions()
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
    """Return the dates of the configured certificate files. Blocks.

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
                    read = lists_valid_until if file == "crl" else valid_until
                    at = read(Path(name).read_bytes())
                except (OSError, ValueError):
                    continue
                dates.append(CertificateDate(door, file, at))
    return dates
