"""Every metric is declared, documented and true."""

import asyncio
import platform
import re
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from holdfast.api.census import Census, dates_of
from holdfast.api.metrics.catalog import METRICS, PREFIX
from holdfast.api.metrics.node import ProcessCollector, process_values
from holdfast.api.metrics.scrape import render
from holdfast.config.schema import Admin, Cluster, Config, Listener
from holdfast.node.config import NodeConfig
from holdfast.node.session.census import SessionCensus
from holdfast.security.certificate_times import ends_of
from tests.support.certificates import revocation_list
from tests.support.fake_cluster import FakeServer
from tests.support.node_bench import NodeBench
from tests.unit.node.test_rights import publication, subscribe

DOCS = Path(__file__).parents[3] / "docs"
ROW = re.compile(r"^\| `((?:holdfast|process)_[a-z_0-9]+)` \| (\w+) \| (.*?) \| (.*) \|$", re.M)
OLD_NAMES = {
    # Dashboards of users have these: a name never changes.
    "holdfast_bytes_received_total", "holdfast_publish_received_total", "holdfast_sessions",
    "holdfast_deliveries_dropped_total", "holdfast_refused_total", "holdfast_connections",
    "holdfast_retained_messages", "holdfast_journal_held_promises", "holdfast_producer_places",
    "holdfast_partition_high_watermark", "holdfast_peer_connected", "holdfast_failovers_total",
    "holdfast_replication_lag_records", "holdfast_federation_link_rtt_ms", "holdfast_ready",
    "holdfast_federation_queued", "holdfast_lease_held", "holdfast_acknowledgement_wait_seconds",
    "holdfast_clock_skew_seconds", "holdfast_federation_edge_messages_total",
}  # fmt: skip


def test_every_metric_is_documented_as_it_is() -> None:
    text = (DOCS / "metrics.md").read_text()
    found = {name: (kind, labels, meaning) for name, kind, labels, meaning in ROW.findall(text)}
    assert len(found) == len(ROW.findall(text)), "a metric has two rows"
    declared = {
        each.exposed(name): (
            each.kind,
            ", ".join(f"`{label}`" for label in each.labels if label != "node"),
            each.help,
        )
        for name, each in METRICS.items()
    }
    assert found == declared


def test_old_names_stay() -> None:
    exposed = {each.exposed(name) for name, each in METRICS.items()}
    assert exposed >= OLD_NAMES
    assert all(name.startswith((PREFIX, "process_")) for name in exposed)


def test_help_says_something() -> None:
    for name, each in METRICS.items():
        assert len(each.help) > 12, name
        assert each.help.endswith("."), name
        assert not each.help.startswith(("Their", "Of ", "What they", "At the")), name


@pytest.mark.parametrize(
    ("accept", "media_type", "last"),
    [
        ("", "text/plain", ""),
        ("*/*", "text/plain", ""),
        ("application/openmetrics-text;version=1.0.0,*/*;q=0.1", "application/openmetrics", "EOF"),
    ],
)
def test_a_scrape_has_the_form_that_is_accepted(accept: str, media_type: str, last: str) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ProcessCollector(FakeServer(None)))
    scrape = asyncio.run(render(registry.collect(), accept))
    assert scrape.media_type.startswith(media_type)
    assert scrape.body.decode().rstrip().endswith(last)


def test_the_build_and_the_process() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ProcessCollector(FakeServer(None)))
    text = asyncio.run(render(registry.collect(), "application/openmetrics-text")).body.decode()
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert samples["holdfast_build_info"].labels["python"] == platform.python_version()
    assert samples["process_cpu_seconds_total"].value > 0
    before = process_values()["process_open_fds"]
    with Path(__file__).open(), Path(__file__).open():
        assert process_values()["process_open_fds"] == before + 2
    started = process_values()["process_start_time_seconds"]
    assert 0 < datetime.now(UTC).timestamp() - started < 86_400


def census_of(bench: NodeBench) -> SessionCensus:
    sessions = [*bench.node.state.sessions.values(), *bench.recorded().sessions.values()]
    return SessionCensus(sessions, bench.journal.high_watermark)


def test_sessions_are_counted_away_behind_and_with_their_backlog() -> None:
    bench = NodeBench()
    away = bench.connect("away", expiry_s=1000)
    subscribe(away, "#")
    away.lose()
    subscribe(bench.connect("here"), "#")
    idle = bench.connect("idle", expiry_s=1000)
    idle.lose()
    writer = bench.connect("writer")
    for number in range(10):
        writer.send(publication(f"t/{number}", b"x", 1))
    bench.settle()
    census = census_of(bench)
    while census.step(1):
        pass
    assert (census.count, census.away, census.behind) == (4, 2, 0)
    # Records of sessions count as well: the cursor has to pass them.
    assert 10 <= census.backlog_records == census.backlog_max <= 20


def test_retained_messages_of_the_broker_do_not_count() -> None:
    bench = NodeBench(NodeConfig(partitions=4, sys_interval_s=10))
    bench.connect("w").send(publication("t", b"x", 0, retain=True))
    bench.node.sys_topics.publish()
    bench.settle()
    state = bench.node.state
    recorded = bench.recorded()
    assert len(state.retained) > 10
    assert recorded.retained.topics.total == 1
    # Nor are they bounded: a limit of one message would have no room for a client's.
    state.config.retained_max = 4
    bench.connect("v").send(publication("u", b"x", 0, retain=True))
    bench.settle()
    assert recorded.retained.topics.total == 2
    assert recorded.retained.refusal(state.config, "", (1, 3), (1, 3), (0, 0))


def test_certificates_end_when_they_say(tmp_path: Path) -> None:
    authority = trustme.CA()
    at = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
    server = authority.issue_cert("localhost", not_after=at)
    chain = tmp_path / "chain.pem"
    for number, blob in enumerate(server.cert_chain_pems):
        blob.write_to_path(str(chain), append=number > 0)
    authority.cert_pem.write_to_path(str(chain), append=True)
    assert min(ends_of(chain.read_bytes())) == at.timestamp()
    # Beyond 2049 the time has another form.
    late = datetime(2060, 1, 2, tzinfo=UTC)
    issued = trustme.CA().issue_cert("localhost", not_after=late)
    pem = issued.cert_chain_pems[0].bytes()
    assert min(ends_of(pem)) == late.timestamp()
    own = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    assert min(ends_of(authority.cert_pem.bytes())) == own.not_valid_after_utc.timestamp()


def test_dates_are_those_of_every_door(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    issued = authority.issue_cert("localhost", not_after=soon)
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "server.pem"))
    (tmp_path / "crl.pem").write_bytes(revocation_list(authority, [], hours=1))
    config = Config(
        listeners=[
            Listener(bind="0.0.0.0", port=8883, certificate=str(tmp_path / "server.pem"), key="k",
                     client_ca=str(tmp_path / "ca.pem"), crl=str(tmp_path / "crl.pem")),
            Listener(port=1),
        ],
        cluster=Cluster(peer_bind="127.0.0.1", certificate=str(tmp_path / "nowhere.pem")),
        admin=Admin(certificate=str(tmp_path / "server.pem"), key="k"),
    )  # fmt: skip
    dates = {(each.door, each.file): each.valid_until for each in dates_of(config)}
    assert dates[("0.0.0.0:8883", "certificate")] == soon.timestamp()
    assert dates[("admin", "certificate")] == soon.timestamp()
    assert abs(dates[("0.0.0.0:8883", "crl")] - time.time() - 3600) < 60
    assert set(dates) == {
        ("0.0.0.0:8883", "crl"),
        ("0.0.0.0:8883", "certificate"),
        ("0.0.0.0:8883", "ca"),
        ("admin", "certificate"),
    }


@given(st.binary(max_size=200), st.integers(0, 2000), st.integers(0, 255))
def test_damaged_certificates_are_refused_and_nothing_else(
    garbage: bytes, at: int, value: int
) -> None:
    def attempt(pem: bytes) -> None:
        try:
            min(ends_of(pem))
        except ValueError:
            return

    attempt(garbage)
    attempt(b"-----BEGIN CERTIFICATE-----\n" + garbage + b"\n-----END CERTIFICATE-----")
    der = bytearray(DER)
    der[at % len(der)] = value
    attempt(ssl.DER_cert_to_PEM_cert(bytes(der)).encode())
    attempt(ssl.DER_cert_to_PEM_cert(bytes(DER[: at % len(DER)])).encode())


DER = ssl.PEM_cert_to_DER_cert(trustme.CA().cert_pem.bytes().decode())


def test_a_census_without_a_broker_is_empty() -> None:
    census = Census(FakeServer(None))
    assert asyncio.run(census.take()) == 0.0
    assert census.sessions.count == 0
