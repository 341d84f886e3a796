"""Retention waits for a registered lake, up to its own limit."""

import json
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from holdfast.cli.main import main
from holdfast_lake.lake.lake import Lake
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_retention import SMALL, first_offsets, publish_many
from tests.support.spark_free_lake import no_spark
from tests.support.waiting import until


def run(broker: Holdfast, path: Path, **options: str) -> None:
    lake = Lake(path, spark=no_spark())
    source = {"servers": f"127.0.0.1:{broker.admin_port}", **options}
    assert lake.run(["records"], source=source).errors == {}


def publish_numbers(broker: Holdfast, first: int, end: int) -> None:
    lines = "".join(f"{number}:{'x' * 1000}\n" for number in range(first, end))
    subprocess.run(
        [str(shutil.which("mosquitto_pub")), "-p", str(broker.port), "-q", "1", "-l",
         "-t", "plant/line"],
        input=lines, text=True, timeout=60, check=True,
    )  # fmt: skip


def test_the_log_stays_until_both_lakes_have_it(
    start_holdfast: StartHoldfast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retention: dict[str, Any] = {"bytes": 131_072, "keep_until_lake": 50_000_000}
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    admin = f"127.0.0.1:{broker.admin_port}"
    publish_many(broker, 50)
    run(broker, tmp_path / "one")
    run(broker, tmp_path / "two")
    publish_many(broker, 600)
    until(lambda: "retention_held_back" in broker.log_text(), "retention never looked")
    assert broker.metric("log_lake_pinned_bytes") > 500_000
    run(broker, tmp_path / "one")
    broker.kill()  # The positions outlive the broker.
    broker.start()
    until(lambda: broker.metric("log_lake_pinned_bytes") > 500_000, "the lake was forgotten")
    assert max(first_offsets(broker)) < 100
    assert main(["log", "groups", "--admin", admin]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert [name.split(".")[:2] for name in names] == [["lake", "one"], ["lake", "two"]]
    # The second lake is gone for good.
    assert main(["log", "groups", "--admin", admin, "--remove", names[1]]) == 0
    until(lambda: max(first_offsets(broker)) > 300, "the log waits for a lake that was removed")
    assert broker.metric("log_lake_lost_records_total") == 0
    run(broker, tmp_path / "one")


SUB = shutil.which("mosquitto_sub")


def subscribe(broker: Holdfast, count: int, *arguments: str) -> list[str]:
    """The payloads of the first messages that mosquitto_sub receives."""
    done = subprocess.run(
        [str(SUB), "-p", str(broker.port), "-q", "1", "-C", str(count), "-W", "60", *arguments],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stderr, broker.log_text()[-3000:])
    return [line.split(":")[0] for line in done.stdout.splitlines()]


@pytest.mark.skipif(SUB is None, reason="mosquitto_sub is not installed")
def test_clients_read_below_the_start_of_the_log(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    """A replay, the last messages, and a session that was away."""
    lake = tmp_path / "lake"
    retention: dict[str, Any] = {
        "bytes": 131_072, "keep_until_lake": 50_000_000, "session_bytes": 65_536
    }  # fmt: skip
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    subscribe(broker, 1, "-c", "-i", "away", "-t", "plant/#", "-E")
    publish_numbers(broker, 0, 400)
    run(broker, lake)
    publish_numbers(broker, 400, 800)
    run(broker, lake)
    publish_numbers(broker, 800, 900)
    until(lambda: max(first_offsets(broker)) > 300, "nothing was removed")
    broker.settings["log"] = {**SMALL, "lake": str(lake)}
    broker.command()  # It writes the settings.
    assert broker.process is not None
    broker.process.send_signal(signal.SIGHUP)
    until(lambda: "reloaded settings=['log.lake']" in broker.log_text(), "no reload")
    numbers = [str(n) for n in range(900)]
    assert subscribe(broker, 900, "-t", "$stream/@earliest/plant/line") == numbers
    assert subscribe(broker, 900, "-t", "$stream/@-1h/plant/#") == numbers
    assert subscribe(broker, 850, "-t", "$stream/@last:850/plant/+") == numbers[50:]
    assert subscribe(broker, 1, "-c", "-i", "away", "-t", "plant/#") == numbers[:1]
    assert subscribe(broker, 899, "-c", "-i", "away", "-t", "plant/#") == numbers[1:]
    assert "records_lost" not in broker.log_text()
    assert log_records(broker, "order=oldest") == numbers
    assert log_records(broker, "order=newest&kind=message") == numbers[::-1]
    url = f"http://127.0.0.1:{broker.admin_port}/api/v1/log/records?filter=plant/%2B"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.apache.arrow.stream"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        table = pa.ipc.open_stream(answer.read()).read_all()
    assert [each.decode().split(":")[0] for each in table["payload"].to_pylist()] == numbers
    partition, offset = table["partition"][0].as_py(), table["offset"][0].as_py()
    assert offset < first_offsets(broker)[partition]
    place = f"partition={partition}&offset={offset}"
    status, text = broker.admin(f"/api/v1/log/record?{place}")
    assert (status, json.loads(text)["record"]["topic"]) == (200, "plant/line"), text
    assert not json.loads(text)["is_first"]
    status, text = broker.admin(f"/api/v1/trace?{place}")
    assert (status, json.loads(text)["record"]["offset"]) == (200, offset), text
    time_us = json.loads(text)["record"]["at_us"]
    status, text = broker.admin(f"/api/v1/trace?topic=plant/line&time_us={time_us}")
    assert (status, json.loads(text)["record"]["at_us"]) == (200, time_us), text


def log_records(broker: Holdfast, query: str) -> list[str]:
    """The payloads of all pages of the log view."""
    found: list[str] = []
    after = ""
    while True:
        status, text = broker.admin(
            f"/api/v1/log/records?filter=plant/line&limit=200&bytes=8&{query}{after}"
        )
        assert status == 200, text
        page = json.loads(text)
        found += [each["content"]["text"].split(":")[0] for each in page["records"]]
        if not page["next"]:
            return found
        after = f"&after={page['next']}"


def test_beyond_its_limit_a_lake_loses_records_and_is_told(
    start_holdfast: StartHoldfast, tmp_path: Path
) -> None:
    retention: dict[str, Any] = {"bytes": 131_072, "keep_until_lake": 262_144}
    broker = start_holdfast({"log": SMALL, "log.retention": retention})
    publish_many(broker, 20)
    run(broker, tmp_path / "lake")
    publish_many(broker, 1500)
    until(lambda: max(first_offsets(broker)) > 300, "the log waits beyond the limit")
    assert "retention_overtook_lake lake='lake.lake." in broker.log_text()
    assert broker.metric("log_lake_lost_records_total") > 0
    run(broker, tmp_path / "lake", failOnDataLoss="false")


def test_no_lake_registers_where_retention_does_not_wait(
    start_holdfast: StartHoldfast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_holdfast({"log": SMALL})
    publish_many(broker, 20)
    run(broker, tmp_path / "lake")
    assert main(["log", "groups", "--admin", f"127.0.0.1:{broker.admin_port}"]) == 0
    assert capsys.readouterr().out.startswith("no groups: ")
