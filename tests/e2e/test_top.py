"""`holdfast top` against a broker with a busy topic and a client that does not read."""

import json
import subprocess
import sys

from tests.e2e import wire
from tests.e2e.brokers import SOURCE, Holdfast, one_process
from tests.e2e.cluster_processes import until
from tests.e2e.conftest import StartHoldfast
from tests.interop.paho_client import Paho


def top(broker: Holdfast, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli.main", "top", "--once", *arguments]
    return subprocess.run(
        [*command, "--admin", f"127.0.0.1:{broker.admin_port}"],
        capture_output=True, text=True, timeout=60, cwd=SOURCE,
    )  # fmt: skip


@one_process("the screen is that of one node")
def test_busy_topics_and_slow_sessions(start_holdfast: StartHoldfast) -> None:
    broker = start_holdfast()
    with wire.Wire(broker.port) as slow:
        slow.connect("slow-client", expiry_s=600)
        slow.subscribe(("#", 1))
    with Paho(broker.port, "writer") as writer:

        def found() -> bool:
            # The first request begins the sampling.
            asked = top(broker, "--json")
            assert asked.returncode == 0, asked.stderr
            for number in range(60):
                writer.publish("hot" if number % 3 else f"cold/{number}", b"x" * 100, 1)
            shown = json.loads(asked.stdout)["now"]
            topics = [each["topic"] for each in shown["topics"]]
            slowest = [each["client"] for each in shown["slow_sessions"]]
            busiest = [each["client"] for each in shown["publishers"]]
            found = (topics[:1], slowest[:1], busiest[:1])
            return found == (["hot"], ["slow-client"], ["writer"])

        until(found, "the busy topic and the slow client are on top")
        shown = top(broker)
        assert shown.returncode == 0, shown.stderr
        assert "slow-client" in shown.stdout
        assert "hot" in shown.stdout
    broker.stop()
    gone = top(broker)
    assert gone.returncode == 1
    assert gone.stderr.startswith("holdfast: ")
