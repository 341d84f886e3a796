"""A lake in a real S3 server, Ceph's RADOS gateway: two drivers at once and kill -9 of all of them.

The drivers reach the gateway through a proxy that answers 500 and 503, is slow and cuts
connections. In the end each message is in the tables once.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark.sql")
pytest.importorskip("obstore")

from pyspark.sql import SparkSession

from holdfast.client.log.lake import objects
from holdfast.client.log.lake.commits import CommitLog
from holdfast.client.log.lake.objects import LakePath, ObjectPath, ObjectReader, location
from tests.support import lake_tables
from tests.support.faulty_proxy import FaultyProxy, faulty_proxy
from tests.support.lake_site import OWN, Site
from tests.support.pipeline_process import PipelineProcess
from tests.support.radosgw import (
    BUCKET,
    KEY,
    SECRET,
    RadosGateway,
    missing_programs,
    rados_gateway,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        bool(missing_programs()),
        reason="Ceph's packages ceph-mon, ceph-osd and radosgw are not there: no "
        + ", ".join(missing_programs()),
    ),
]

KILLS = 4
WAIT_S = 600.0
FAULTS = 0.05
"""The share of the requests that meet a fault."""
SEED = 14


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    with rados_gateway(tmp_path_factory.mktemp("ceph")) as found:
        yield found


class Drivers:
    """Two runs of the jobs on one lake, as on two machines: neither sees the other's locks."""

    def __init__(self, site: Site, lake: LakePath, folder: Path, endpoint: str) -> None:
        self._site = site
        self._lake = lake
        self._folder = folder
        self._environment = {"AWS_ENDPOINT_URL": endpoint}
        self.running = [self._start(0), self._start(1)]

    def _start(self, number: int) -> PipelineProcess:
        temporary = self._folder / f"tmp{number}"
        temporary.mkdir(exist_ok=True)
        words = [*OWN, "--continuous", "--trigger", "0s", "--max-records-per-trigger", "40"]
        words += ["--from", self._site.journal.address, "--format", self._site.store]
        words += ["--tables", lake_tables.__file__, "--master", "local[2]"]
        environment = {**self._environment, "TMPDIR": str(temporary)}
        log = self._folder / f"log{number}"
        return PipelineProcess(self._lake, log, words, environment)

    def kill9(self, number: int) -> None:
        self.running[number].kill9()
        self.running[number] = self._start(number)

    def end(self) -> None:
        for each in self.running:
            each.kill9()


def kill_again_and_again(site: Site, drivers: Drivers, gateway: RadosGateway) -> None:
    """Each time the last table has gone on since the last time: one driver, both, the gateway."""
    chosen = random.Random(SEED)
    log = CommitLog(location(str(site.path)), "per_hour")
    before = 0
    for number in range(KILLS):

        def has_gone_on(before: int = before) -> bool:
            site.publish(1)
            newest = log.newest()
            return newest is not None and newest.version >= before + 2

        drivers.running[0].wait_for(has_gone_on, f"per_hour after version {before}", WAIT_S)
        if number % 3 == 2:
            gateway.kill9_gateway()
            gateway.start_gateway()
        for driver in (0, 1) if number % 3 == 1 else (chosen.randrange(2),):
            drivers.kill9(driver)
        newest = log.newest()
        assert newest is not None
        before = newest.version
    site.publish(50)


@pytest.mark.parametrize("store", ["parquet", "delta"])
def test_two_drivers_killed_on_a_store_that_fails(
    spark: SparkSession,
    tmp_path: Path,
    gateway: RadosGateway,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", gateway.endpoint),
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    objects.client.cache_clear()
    site = Site(spark, tmp_path, store)
    lake = location(f"s3://{BUCKET}/{store}")
    site.path = lake  # type: ignore[assignment]
    site.publish(200)
    with faulty_proxy(gateway.endpoint, FAULTS, SEED) as (proxy, endpoint):
        drivers = Drivers(site, lake, tmp_path, endpoint)
        try:
            kill_again_and_again(site, drivers, gateway)
        finally:
            drivers.end()
    assert set(proxy.met) == set(FaultyProxy.FAULTS)
    assert site.run().ok
    assert site.run().commits == {}
    check(site)
    objects.client.cache_clear()


def check(site: Site) -> None:
    """The tables by their commits, and by their files alone, are what was sent."""
    lake = site.lake(())
    good = [each for each in site.sent if each[2] >= 0]
    for name, rows in (("records", len(site.sent)), ("numbered", len(good))):
        assert lake.table(name).count() == rows
        assert rows_without_commits(site, name) == rows
    assert lake.table("quarantine").count() == len(site.sent) - len(good)
    found = lake.table("numbered").select("topic", "n", "number").collect()
    assert sorted((row.topic, row.n) for row in found) == sorted((t, n) for t, _, n in good)
    by_topic = Counter(topic for topic, _, _ in good)
    for topic, count in by_topic.items():
        numbers = sorted(row.number for row in found if row.topic == topic)
        assert numbers == list(range(1, count + 1))
    hours = Counter((topic, hour) for topic, hour, _ in good)
    per_hour = lake.table("per_hour").collect()
    assert sorted(row.rows for row in per_hour) == sorted(hours.values())


def rows_without_commits(site: Site, name: str) -> int:
    """As a program sees them that knows only the files, or only Delta."""
    if site.store == "delta":
        import deltalake

        table = deltalake.DeltaTable(f"{site.path}/{name}", storage_options={"allow_http": "true"})
        return int(table.to_pyarrow_table().num_rows)
    place = location(str(site.path)) / name
    assert isinstance(place, ObjectPath)
    return sum(
        int(pq.read_metadata(ObjectReader(each.path)).num_rows)
        for each in place.objects()
        if each.path.name.endswith(".parquet")
    )
