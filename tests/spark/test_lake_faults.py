"""A lake in an S3 server of which 5 % of the requests fail, while the pipeline commits to it and a
reader reads it: each read has a beginning of the log, and the end has all of it."""

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")
pytest.importorskip("obstore")

from holdfast.client.log import LogClient
from holdfast.client.log.lake import objects
from holdfast.client.log.lake.objects import location
from holdfast.log.record import MESSAGE
from tests.support.faulty_proxy import FaultyProxy, faulty_proxy
from tests.support.journal_files import Journal
from tests.support.moto_server import BUCKET, ENVIRONMENT, is_installed, moto_server
from tests.support.pipeline_process import PipelineProcess, rows_total

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not is_installed(), reason="pip install 'moto[server]'"),
]

Row = tuple[int, int, str, bytes]
FAULTS = 0.05
SEED = 5
STEP = 40
READS = 10


def rows_of(lake: str) -> list[Row]:
    with LogClient.offline(lake=lake).read() as cursor:
        return [(each.partition, each.offset, each.topic, each.payload) for each in cursor]


def rows_sent(journal: Journal) -> list[Row]:
    return [
        (each.partition, each.offset, each.topic.decode(), each.payload)
        for each in journal.records()
        if each.kind == MESSAGE
    ]


def test_a_store_of_which_one_request_in_twenty_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "data", partitions=3, segment_bytes=20_000)
    lake = f"s3://{BUCKET}/plant"

    def publish(count: int) -> None:
        for number in range(len(journal.batches), len(journal.batches) + count):
            journal.publish(f"site/{number % 7}", b"%d" % number + bytes(number % 400))

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    publish(STEP)
    with (
        moto_server(tmp_path / "moto.log") as server,
        faulty_proxy(server, FAULTS, SEED) as (proxy, endpoint),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        objects.client.cache_clear()
        words = ["records", "--continuous", "--trigger", "0s", "--max-records-per-trigger"]
        words += [str(STEP), "--from", journal.address, "--master", "local[2]"]
        run = PipelineProcess(location(lake), tmp_path / "log", words)
        reads = before = 0
        try:
            run.wait_for_rows("records", STEP)
            while reads < READS or set(proxy.met) < set(FaultyProxy.FAULTS):
                publish(2 * STEP)
                run.wait_for_rows("records", before + STEP)
                found = rows_of(lake)
                reads += 1
                assert before + STEP <= len(found), "a row is in the lake, and not in the read"
                before = len(found)
                expected = rows_sent(journal)
                for partition in range(journal.partitions):
                    mine = [row for row in found if row[0] == partition]
                    assert mine == [row for row in expected if row[0] == partition][: len(mine)]
            run.wait_for_rows("records", len(journal.batches))
            assert run.process.poll() is None, run.log_text()
        finally:
            run.kill9()
        assert sorted(rows_of(lake)) == sorted(rows_sent(journal))
        assert rows_total(location(lake), "records") == len(journal.batches)
        print(dict(proxy.met), os.linesep, f"{reads} reads, {len(journal.batches)} rows")
    objects.client.cache_clear()
