"""`holdfast.testing` and the pytest plugin, as a project that installed Holdfast uses them."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from holdfast.client import Client, ConnectionLost, Options
from holdfast.client.blocking import Client as BlockingClient
from holdfast.testing import Broker, BrokerFailed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
CALLS_MAX = 60_000
"""The most function calls of a start. It takes 34,000 in either form, and 7 ms on an idle core."""

UNTOUCHED = """
import sys

def test_nothing_of_a_broker_is_loaded():
    assert "holdfast.pytest_plugin" in sys.modules
    assert not [name for name in sys.modules if name.startswith(("holdfast.process", "uvloop"))]

"""


def test_a_project_that_installed_holdfast(tmp_path: Path) -> None:
    """The page's tests and programs, in a directory that knows nothing of this one."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    tests = [block for block in blocks if "def test_" in block]
    programs = [block for block in blocks if "def test_" not in block]
    assert len(tests) == 2
    assert len(programs) == 2
    (tmp_path / "test_page.py").write_text(UNTOUCHED + "\n".join(tests))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if not _is_installed_with_plugin():
        command += ["-p", "holdfast.pytest_plugin"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    for program in programs:
        exec(compile(program, "docs/testing.md", "exec"), {"__name__": "page"})


def _is_installed_with_plugin() -> bool:
    from importlib.metadata import entry_points

    return any(each.value == "holdfast.pytest_plugin" for each in entry_points(group="pytest11"))


def test_a_start_is_small() -> None:
    """Counted as calls, because other processes change the time."""
    with Broker():
        pass  # loads the modules
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        broker = Broker().start()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    broker.close()
    assert CALLS_MAX / 10 < calls < CALLS_MAX


def test_two_brokers_in_one_loop() -> None:
    asyncio.run(_use_two_brokers())


async def _use_two_brokers() -> None:
    mounted = {"mount": "site/"}
    async with Broker() as one, Broker(listeners=[{}, mounted], admin=True) as other:
        assert len({one.port, *other.ports, other.admin_port}) == 4
        async with (
            Client(other.host, other.ports[0]) as outside,
            Client(other.host, other.ports[1]) as inside,
            Client(servers=[one.url]) as apart,
        ):
            await outside.subscribe(("site/#", 1))
            await apart.publish("site/x", b"elsewhere", qos=1)
            await inside.publish("x", b"here", qos=1)
            async for message in outside.messages():
                assert (message.topic, message.payload) == ("site/x", b"here")
                break
    assert not one.is_running
    assert not other.is_running


def test_a_killed_broker_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    options = Options(client_id="meter", clean_start=False, session_expiry_s=3600)
    with Broker(data=tmp_path / "kept") as broker:
        port = broker.port
        client = BlockingClient(broker.host, port, options=options)
        client.connect()
        client.subscribe(("power/#", 1))
        with BlockingClient(broker.host, port) as publisher:
            begin = time.monotonic()
            broker.kill()
            with pytest.raises(ConnectionLost):
                publisher.publish("power/1", b"lost", qos=1)
            assert time.monotonic() - begin < 5
        with pytest.raises(ConnectionLost):
            client.receive(timeout_s=5)
        assert not list((tmp_path / "kept" / "snapshots").iterdir())
        broker.start()
        assert broker.port == port
        with BlockingClient(broker.host, port) as publisher:
            publisher.publish("power/1", b"42", qos=1)
        broker.stop()
        assert list((tmp_path / "kept" / "snapshots").iterdir())
        broker.start()
        with BlockingClient(broker.host, port, options=options) as client:
            message = client.receive(timeout_s=5)
            assert message is not None
            assert message.payload == b"42"
    assert (tmp_path / "kept" / "manifest.json").is_file()


def test_a_temporary_directory_is_removed() -> None:
    with Broker() as broker:
        data = broker.data
        assert data.is_dir()
    assert not data.parent.exists()
    with pytest.raises(BrokerFailed, match="has not been started"):
        assert broker.port


def test_failures_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BrokerFailed, match=r"limits\.qos_max = 7: must be a whole number from 0"):
        Broker(settings={"limits.qos_max": 7}).start()
    with pytest.raises(BrokerFailed, match="no clusters"):
        Broker(settings={"cluster.peer_bind": "127.0.0.1"}).start()
    with Broker(data=tmp_path) as broker:
        with pytest.raises(BrokerFailed, match="already"):
            broker.start()
        with pytest.raises(BrokerFailed, match="in use"):
            Broker(port=broker.port).start()
        with pytest.raises(BrokerFailed, match="another"):
            Broker(data=tmp_path).start()
        with pytest.raises(ValueError, match="admin=True"):
            assert broker.admin_port
        server = broker._server
        assert server is not None
        assert broker._loop is not None
        broker._loop.call_soon_threadsafe(server.fail, OSError("the disk is gone"))
        with pytest.raises(BrokerFailed, match="stopped by itself: the disk is gone"):
            broker.stop()
