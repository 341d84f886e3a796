"""docs/sizing.md, with Mosquitto's clients in place of those of `bench.sizing`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import until
from tests.e2e.conftest import StartHoldfast
from tests.support.api_client import Api

PUB, SUB = shutil.which("mosquitto_pub"), shutil.which("mosquitto_sub")
PAGE = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
TOPIC = "plant/line-1/machine-7"
MESSAGES = 1000
TIMEOUT_S = 200
ROWS = re.findall(r"^\| (?:no durable subscriber|(\d) of QoS (\d)) \| (\d+) \|", PAGE, re.MULTILINE)
NEAR = (0.6, 1.6)
"""The figure of a run, as a multiple of the page's. Mosquitto's clients have another window, and a
busy machine has smaller batches."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PUB is None or SUB is None, reason="no clients of Mosquitto"),
]


@pytest.mark.parametrize(("subscribers", "qos", "expected"), ROWS)
def test_bytes_of_a_message(
    start_holdfast: StartHoldfast, subscribers: str, qos: str, expected: str
) -> None:
    assert len(ROWS) == 5
    broker = start_holdfast()
    api = Api(broker.admin_port)

    def log_bytes() -> int:
        [node] = api.get("storage")["nodes"]
        return int(node["log_bytes"])

    def is_settled() -> bool:
        """Whether the sessions, whose clients have received all and left, have finished all."""
        rows = api.get("sessions")["sessions"]
        return not any(each["connected"] or each["inflight"] for each in rows)

    port = ["-p", str(broker.port), "-t", TOPIC]
    subs = []
    for number in range(int(subscribers or 0)):
        command = [str(SUB), *port, "-q", qos, "-c", "-i", f"s{number}"]
        subprocess.run([*command, "-E"], check=True, timeout=TIMEOUT_S)
        taken = [*command, "-C", str(MESSAGES), "-W", str(TIMEOUT_S)]
        subs.append(subprocess.Popen(taken, stdout=subprocess.DEVNULL))
    until(
        lambda: sum(each["connected"] for each in api.get("sessions")["sessions"]) == len(subs),
        "the subscribers are there",
    )
    before = log_bytes()
    lines = "".join(f"{number:064}\n" for number in range(MESSAGES))
    publish = [str(PUB), *port, "-q", str(max(1, int(qos or 0))), "-l"]
    subprocess.run(publish, input=lines, text=True, check=True, timeout=TIMEOUT_S)
    assert [each.wait(TIMEOUT_S) for each in subs] == [0] * len(subs)
    until(is_settled, "everything is acknowledged")
    found = (log_bytes() - before) / MESSAGES
    low, high = (factor * int(expected) for factor in NEAR)
    assert low <= found <= high, f"{found:.0f} bytes a message, the page says {expected}"
