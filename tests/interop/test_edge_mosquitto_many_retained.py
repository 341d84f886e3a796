"""Reading what a Mosquitto has retained, where that is more than it queues for a client."""

import asyncio
from pathlib import Path

import pytest

from holdfast_federation.sidecar.edge import RetainedFound
from holdfast_federation.sidecar.edge_mqtt.retained import RetainingMqttEdge
from tests.e2e.brokers import MOSQUITTO, Mosquitto
from tests.interop.test_edge_mosquitto import run, running, settings_for, user, wanting
from tests.support.edge_host import ScriptedHost

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
COUNT = 3000


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_more_than_mosquitto_queues(tmp_path: Path, qos: int) -> None:
    """With the defaults of its configuration."""
    mosquitto = Mosquitto(tmp_path, "max_queued_messages 1000\nmax_inflight_messages 20")
    mosquitto.start()

    async def test() -> None:
        host = ScriptedHost()
        async with running(settings_for(mosquitto), host) as edge, user(mosquitto) as client:
            assert isinstance(edge, RetainingMqttEdge)
            await wanting(edge, host, "other")
            futures = [
                await client.submit(f"r/{number}", b"x", qos=qos, retain=True)
                for number in range(COUNT)
            ]
            await asyncio.gather(*futures)
            done: asyncio.Future[RetainedFound | None] = asyncio.get_running_loop().create_future()
            edge.read_retained(frozenset({"r/#"}), done.set_result)
            found = await done
            assert found is not None
            assert (len(found.messages), found.is_complete) == (COUNT, True)

    try:
        run(test)
    finally:
        mosquitto.kill()
