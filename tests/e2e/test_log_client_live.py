"""`holdfast.client.log` against a real broker, and the log over HTTP for DuckDB and Polars."""

import asyncio
import io
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("polars")

import duckdb
import polars as pl
import pyarrow as pa

from holdfast.client.log import AdminError, AsyncLogClient, LogClient, LogMessage, LogOptionError
from tests.e2e.brokers import Holdfast
from tests.e2e.wire import Wire
from tests.support.api_client import Api, Refused
from tests.support.ports import free_port

ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holdfast]:
    """One broker for all tests, which read topics of their own."""
    broker = Holdfast(tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker
    broker.kill()
    assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


def client(broker: Holdfast) -> LogClient:
    return LogClient(f"127.0.0.1:{broker.admin_port}")


def publish(broker: Holdfast, site: str, numbers: range, topics: int = 5) -> None:
    with Wire(broker.port) as wire:
        wire.connect("meter")
        for number in numbers:
            wire.publish(f"{site}/{number % topics}/power", b"%d" % number, qos=1)


def numbers(messages: list[LogMessage]) -> list[int]:
    return sorted(int(each.payload) for each in messages)


def get_arrow(broker: Holdfast, query: str) -> tuple[pa.Table, str]:
    """The table of an Arrow response, and the cursor of the next one."""
    url = f"http://127.0.0.1:{broker.admin_port}/api/v1/log/records?{query}"
    request = urllib.request.Request(url, headers={"Accept": ARROW})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"] == ARROW
        table = pa.ipc.open_stream(io.BytesIO(answer.read())).read_all()
        return table, answer.headers["Holdfast-Next"]


def test_reads_a_real_log(broker: Holdfast) -> None:
    publish(broker, "read", range(100))
    log = client(broker)
    found = list(log.read("read/#", start="-10m"))
    assert numbers(found) == list(range(100))
    assert abs(found[0].time - datetime.now(UTC)) < timedelta(minutes=2)
    assert (found[0].qos, found[0].client_id, found[0].properties) == (1, "meter", {})
    with pytest.raises(AdminError, match="nothing listens"):
        LogClient(f"127.0.0.1:{free_port()}", wait_s=0).read()


def test_duckdb_and_polars_read_over_http(broker: Holdfast) -> None:
    publish(broker, "http", range(200), topics=20)
    table, following = get_arrow(broker, "filter=http/%2B/power&columns=topic,payload,timestamp")
    assert following == ""
    rows = duckdb.from_arrow(table).aggregate("topic, count(*)").fetchall()
    assert len(rows) == 20
    assert sum(count for _, count in rows) == 200
    frame = pl.from_arrow(table)
    assert frame["payload"].cast(pl.String).cast(pl.Int64).sum() == sum(range(200))

    # In pages, all once; the same as the client's.
    tables, following = [], ""
    while not tables or following:
        page, following = get_arrow(broker, f"rows=60&after={following}" if tables else "rows=60")
        assert page.num_rows <= 60 + 16
        tables.append(page)
    assert len(tables) > 3
    places = [("partition", "ascending"), ("offset", "ascending")]
    whole = pa.concat_tables(tables).sort_by(places)
    assert whole.equals(client(broker).read().to_arrow().sort_by(places))
    connection = duckdb.connect()
    connection.register("messages", client(broker).read("http/#").arrow_reader("topic,offset"))
    assert connection.sql("select count(distinct topic) from messages").fetchall() == [(20,)]

    for wrong in ("limit=5", "columns=a", "columns=topic,topic", "rows=0", "order=newest"):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            get_arrow(broker, wrong)
        assert refusal.value.code == 400
    with pytest.raises(Refused, match="rows: it is for Arrow"):
        Api(broker.admin_port).get("log/records", rows=5)


def test_the_curl_of_the_guide(broker: Holdfast, tmp_path: Path) -> None:
    publish(broker, "plant", range(10))
    guide = (Path(__file__).parents[2] / "docs" / "log-client.md").read_text()
    (command,) = re.findall(r"```sh\n(curl .*?)```", guide, re.DOTALL)
    assert "127.0.0.1:18083" in command
    command = command.replace("127.0.0.1:18083", f"127.0.0.1:{broker.admin_port}")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, timeout=20)
    table = pa.ipc.open_stream((tmp_path / "hour.arrows").read_bytes()).read_all()
    assert table.column_names == ["topic", "payload"]
    assert sorted(map(int, table["payload"].to_pylist())) == list(range(10))


def test_asyncio_follows_commits_and_is_cancelled(broker: Holdfast) -> None:
    async def scenario() -> None:
        log = AsyncLogClient(f"127.0.0.1:{broker.admin_port}")
        cursor = await log.read("aio/#", start="latest", follow=True, group="aio")
        # Before its first commit a group has no place.
        await cursor.commit()
        await asyncio.to_thread(publish, broker, "aio", range(20))
        found = []
        async for message in cursor:
            found.append(message)
            if len(found) == 15:
                break
        await cursor.commit()
        cursor.close()
        async with await log.read("aio/#", group="aio") as rest:
            found += [message async for message in rest]
        assert numbers(found) == list(range(20))
        async with await log.read("aio/#", start="latest", follow=True, idle_s=0.05) as idle:
            async for messages in idle.batches():
                assert messages == []
                break
        async with await log.read("aio/#", start="latest", follow=True) as silent:
            task = asyncio.create_task(anext(silent))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(StopAsyncIteration):
                await anext(silent)
        tables = [each async for each in (await log.read("aio/#")).arrow("payload")]
        assert sum(each.num_rows for each in tables) == 20

    asyncio.run(scenario())


def test_a_kill_costs_neither_a_message_nor_a_group(broker: Holdfast) -> None:
    """A reader that follows has every message once, at the seam to live and over a kill -9; a
    group has the offsets that it committed."""
    log, api = client(broker), Api(broker.admin_port)
    publish(broker, "kill", range(100))
    with log.read("kill/#", group="lake") as half:
        done = [next(half) for _ in range(37)]
        half.commit()
    found: list[LogMessage] = []
    cursor = log.read("kill/#", follow=True)
    reader = threading.Thread(target=lambda: found.extend(cursor))
    reader.start()
    try:
        publish(broker, "kill", range(100, 150))
        broker.kill()
        broker.start()
        publish(broker, "kill", range(150, 200))
        deadline = time.monotonic() + 30
        while len(found) < 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        # At the end of the log it waits, and does not ask again and again.
        used_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used_s < 0.1
    finally:
        cursor.close()
        reader.join(5)
    assert numbers(found) == list(range(200))

    with log.read("kill/#", group="lake") as rest:
        done += rest
        assert numbers(done) == list(range(200))
        rest.commit()
        committed = rest.position
    group = api.get("log/group", group="lake")
    offsets = {each["partition"]: each["offset"] for each in group["offsets"]}
    own = {each.partition for each in done}
    assert {p: offsets[p] for p in own} == {p: committed.offsets[p] for p in own}
    assert {each["by"] for each in group["offsets"]} == {"local"}
    with log.read(group="lake", start="latest") as again:
        assert again.position.offsets == offsets

    # Offsets are no messages, and clients cannot set them.
    assert not list(log.read("$log/#"))
    with Wire(broker.port) as wire:
        wire.connect("mallory")
        answer = b'{"offset":0,"at_us":9999999999999999,"by":"mallory"}'
        wire.publish("$log/groups/lake/0", answer, qos=1, retain=True)
    assert api.get("log/group", group="lake")["offsets"] == group["offsets"]
    for wrong in ([[99, 0]], [[0, -1]], [[0, 1], [0, 2]]):
        with pytest.raises(Refused, match="400"):
            api.post("log/group", {"offsets": wrong}, group="lake")
    with pytest.raises(Refused, match="400: ends has 1"):
        api.post("log/wait", {"ends": [0]})
    with pytest.raises(AdminError, match=r"400 to .*letters, digits"):
        log.read(group="a/b")
    assert [each["group"] for each in api.get("log/groups", after="aio")["groups"]] == ["lake"]
    api.delete("log/group", group="lake")
    assert [each["group"] for each in api.get("log/groups")["groups"]] == ["aio"]
    with pytest.raises(LogOptionError, match="group"):
        log.read().commit()
