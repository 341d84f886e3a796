"""examples/sparkplug.py: births, deaths and rebirths over a broker, and what the pipeline reads."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
pa = pytest.importorskip("pyarrow")

from examples import sparkplug  # noqa: E402
from examples.sparkplug import EdgeNode, HostApplication, run_edge, run_host  # noqa: E402
from holdfast.client.log import LogClient  # noqa: E402
from holdfast.client.log.lake.commits import QUARANTINED, ROWS  # noqa: E402
from holdfast.testing import Broker  # noqa: E402
from holdfast_lake.tables import columns as declared  # noqa: E402
from holdfast_lake.tables.inference import infer  # noqa: E402
from holdfast_lake.tables.readings import ReadingsFold  # noqa: E402
from holdfast_lake.tables.rules import with_defaults  # noqa: E402
from tests.e2e.wire import Wire  # noqa: E402

WAIT_S = 20.0
NODE = "plant/line-1"


class Plant:
    """The values that the edge node reads, and the host application's view of them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.values: dict[str, dict[str, Any]] = {
            "press": {"force": 80.5, "parts": -3},
            "oven": {"door open": False, "program": "bake"},
        }
        self.edge = EdgeNode("plant", "line-1")
        self.host = HostApplication()
        self.topics: set[str] = set()
        self._seen = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self, *programs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in programs]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run_edge(self) -> Coroutine[Any, Any, None]:
        return run_edge(self.broker.url, self.edge, lambda: self.values, 0.01)

    def run_host(self, host: HostApplication) -> Coroutine[Any, Any, None]:
        self.topics.clear()

        def seen(topic: str) -> None:
            self.topics.add(topic)
            self._seen.set()

        return run_host(self.broker.url, "scada", host, seen)

    async def until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_done():
                self._seen.clear()
                await self._seen.wait()

    def has_all(self, host: HostApplication) -> bool:
        """Whether the host application has every value of a connected edge node."""
        node = host.nodes.get(NODE)
        if node is None or not node.is_online:
            return False
        found = {key: value for key, value in node.values.items() if key[0]}
        return found == {
            (device, name): value
            for device, values in self.values.items()
            for name, value in values.items()
        }


def retained_state(broker: Broker) -> Any:
    with Wire(broker.port) as client:
        client.connect("watcher")
        client.subscribe(("spBv1.0/STATE/scada", 1))
        return json.loads(client.message().payload)


async def play(broker: Broker) -> None:
    """A host, an edge node that is cut off, another host that comes late."""
    plant = Plant(broker)
    host = plant.host
    async with plant.running(plant.run_host(host), plant.run_edge()):
        await plant.until(lambda: plant.has_all(host))
        assert host.nodes[NODE].bd_seq == 0
        assert (await asyncio.to_thread(retained_state, broker))["online"] is True
        plant.values["press"] = {"force": 81.25, "parts": 4}
        await plant.until(lambda: plant.has_all(host))
        # The broker publishes the will of a connection that breaks.
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await plant.until(lambda: host.nodes[NODE].bd_seq not in (None, 0) and plant.has_all(host))
    assert (await asyncio.to_thread(retained_state, broker))["online"] is False
    late = HostApplication()
    async with plant.running(plant.run_edge(), plant.run_host(late)):
        await plant.until(lambda: "spBv1.0/STATE/scada" in plant.topics)
        plant.values["oven"]["program"] = "cool"
        await plant.until(lambda: plant.has_all(late))
        plant.values["oven"]["weight"] = 7.5  # a metric that no birth had
        await plant.until(lambda: plant.has_all(late))


def silver(log: LogClient) -> tuple[list[dict[str, Any]], list[Any]]:
    """The readings and the quarantine that the pipeline makes of a log, without Spark."""
    fold = ReadingsFold(with_defaults(()))
    with log.read() as cursor:
        records = cursor.to_arrow().combine_chunks().to_batches()[0]
    rows, _ = fold.spread(records.select(fold.columns))
    pieces = fold.fold(
        pa.Table.from_batches([rows]), pa.Table.from_batches([], schema=declared.STATES), 0
    )
    found: dict[str, list[Any]] = {ROWS: [], QUARANTINED: []}
    for output, batch in pieces:
        if output in found:
            found[output] += batch.to_pylist()
    return found[ROWS], found[QUARANTINED]


def test_a_plant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparkplug, "RETRY_S", 0.05)
    with Broker(admin=True, settings={"log.qos0": ["spBv1.0/#"]}) as broker:
        asyncio.run(play(broker))
        log = LogClient(f"{broker.host}:{broker.admin_port}")
        readings, quarantine = silver(log)
        with log.read() as cursor:
            assert infer([(each.topic, each.payload, each.timestamp_us) for each in cursor]) == []
    assert not quarantine
    by_metric: dict[tuple[str, str], list[Any]] = {}
    for row in sorted(readings, key=lambda row: (row["store_time"], row["offset"])):
        kinds = ("value_double", "value_string", "value_boolean")
        value = next((row[kind] for kind in kinds if row[kind] is not None), None)
        by_metric.setdefault((row["device"], row["metric"]), []).append(value)
    assert by_metric[f"{NODE}/press", "force"][:2] == [80.5, 81.25]
    assert by_metric[f"{NODE}/press", "parts"][:2] == [-3, 4]
    assert "cool" in by_metric[f"{NODE}/oven", "program"]
    online = by_metric[NODE, "$online"]
    assert online[0] is True
    assert online[-1] is False
    assert by_metric["STATE/scada", "$online"][-1] is False


def births_taken(host: HostApplication, edge: EdgeNode, values: Any) -> None:
    edge.connect()
    for topic, payload in edge.births(values):
        assert host.take(topic, payload, 0) is None


def test_a_lost_message_is_noticed() -> None:
    host, edge = HostApplication(), EdgeNode("plant", "line-1")
    births_taken(host, edge, {"press": {"force": 1.0}})
    edge.data({"press": {"force": 2.0}})  # lost
    [(topic, payload)] = edge.data({"press": {"force": 3.0}})
    asked = host.take(topic, payload, 10)
    assert asked is not None
    assert asked[0] == "spBv1.0/plant/NCMD/line-1"
    assert not host.nodes[NODE].is_online
    assert host.nodes[NODE].values["press", "force"] == 1.0
    assert host.take(topic, payload, 11) is None, "it asks once in REBIRTH_S"
    assert host.take(topic, payload, 16) is not None


def test_numbers_begin_again_after_255() -> None:
    host, edge = HostApplication(), EdgeNode("plant", "line-1")
    births_taken(host, edge, {"press": {"parts": 0}})
    for number in range(1, 600):
        [(topic, payload)] = edge.data({"press": {"parts": number}})
        assert host.take(topic, payload, 0) is None
    assert host.nodes[NODE].values["press", "parts"] == 599
    assert edge.data({"press": {"parts": 599}}) == [], "nothing has changed"


def test_a_death_of_an_earlier_connection() -> None:
    host, edge = HostApplication(), EdgeNode("plant", "line-1")
    will = edge.connect()
    births_taken(host, edge, {"press": {"force": 1.0}})
    assert isinstance(will.payload, bytes)
    host.take(will.topic, will.payload, 0)
    assert host.nodes[NODE].is_online
    host.take(*edge.death(), 0)
    assert not host.nodes[NODE].is_online


def test_what_is_no_sparkplug(capsys: pytest.CaptureFixture[str]) -> None:
    host = HostApplication()
    assert host.take("spBv1.0/plant/NDATA/line-1", b"\xff\xff", 0) is None
    assert "no Sparkplug B payload" in capsys.readouterr().err
