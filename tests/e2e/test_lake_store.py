"""Sessions that read below the start of the log, in a lake of a real S3 server: when the first
message comes, whether the seam to the log is felt, and whom a slow store delays."""

import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("obstore")

from holdfast.client.log.lake import objects
from tests.e2e.brokers import Holdfast
from tests.e2e.conftest import StartHoldfast
from tests.e2e.test_retention import SMALL, first_offsets
from tests.e2e.test_retention_lake import publish_numbers, run
from tests.e2e.wire import Wire
from tests.support import faulty_proxy
from tests.support.moto_server import BUCKET, ENVIRONMENT, is_installed, moto_server
from tests.support.waiting import until

IN_LAKE = 2000
BEFORE = 2100
ALL = 2110
SLOW_S = 1.0


class Resumed:
    """The times in seconds, from the CONNECT, at which a session received its messages."""

    def __init__(self, broker: Holdfast, name: str, count: int) -> None:
        self.times_s: list[float] = []
        found = []
        with Wire(broker.port, 5, 60.0) as client:
            began = time.perf_counter()
            client.connect(name, clean=False, expiry_s=3600)
            for _ in range(count):
                found.append(int(client.message(60).payload.split(b":")[0]))
                self.times_s.append(time.perf_counter() - began)
        assert found == list(range(ALL - count, ALL))

    @property
    def seam_s(self) -> float:
        """The longest pause around the first message of the log."""
        some = self.times_s[IN_LAKE - 5 : IN_LAKE + 5]
        return max(after - before for before, after in pairwise(some))


def leave(broker: Holdfast, *names: str) -> None:
    """Makes sessions that are away from now on."""
    for name in names:
        with Wire(broker.port, 5, 30.0) as client:
            client.connect(name, clean=False, expiry_s=3600)
            client.subscribe(("plant/#", 1))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(not is_installed(), reason="pip install 'moto[server]'")
def test_a_slow_store_delays_only_who_needs_it(
    start_holdfast: StartHoldfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(faulty_proxy, "SLOW_S", SLOW_S)
    with (
        moto_server(tmp_path / "moto.log") as server,
        faulty_proxy.faulty_proxy(server, 0.0, 1) as (proxy, endpoint),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        objects.client.cache_clear()
        retention = {"bytes": 131_072, "keep_until_lake": 50_000_000, "session_bytes": 65_536}
        lake = f"s3://{BUCKET}/plant"
        broker = start_holdfast({"log": SMALL, "log.retention": retention})
        leave(broker, "one", "two", "early", "three")
        for first in (0, IN_LAKE // 2):
            publish_numbers(broker, first, first + IN_LAKE // 2)
            run(broker, lake)  # type: ignore[arg-type]
        publish_numbers(broker, IN_LAKE, BEFORE)
        until(lambda: max(first_offsets(broker)) > 300, "nothing was removed")
        leave(broker, "near")
        publish_numbers(broker, BEFORE, ALL)
        broker.settings["log"] = {**SMALL, "lake": lake}
        broker.command()  # It writes the settings.
        assert broker.process is not None
        broker.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded settings=['log.lake']" in broker.log_text(), "no reload")
        # The first one may wait for the start of the process that reads the lake.
        fast = [Resumed(broker, name, ALL) for name in ("one", "two")]
        broker.kill()
        broker.start()
        # It waits for the start of that process.
        fast.append(Resumed(broker, "early", ALL))
        broker.kill()  # It keeps what it has read of the lake.
        broker.start()
        monkeypatch.setattr(proxy, "fault", lambda: "slow")
        slow: list[Resumed] = []
        thread = threading.Thread(target=lambda: slow.append(Resumed(broker, "three", ALL)))
        thread.start()
        near = Resumed(broker, "near", ALL - BEFORE)
        thread.join()
        objects.client.cache_clear()
    names = ("after a reload", "later", "right after a start", "slow store")
    for name, each in zip(names, [*fast, *slow], strict=True):
        print(f"{name}: first message {each.times_s[0]:.3f} s, seam {each.seam_s:.3f} s")
    print(f"without need of the lake: first message {near.times_s[0]:.3f} s")
    assert slow[0].times_s[0] > SLOW_S
    assert near.times_s[-1] < SLOW_S
