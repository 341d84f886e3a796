"""The log over HTTP where it cannot give all: behind retention, and at a node without pyarrow."""

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import until
from tests.e2e.conftest import StartHoldfast
from tests.e2e.wire import Wire
from tests.support.api_client import Api, Refused

ARROW = "application/vnd.apache.arrow.stream"


def publish(broker: Holdfast, topic: str, count: int) -> None:
    with Wire(broker.port) as wire:
        wire.connect("meter")
        for number in range(count):
            wire.publish(topic, b"%06d" % number + bytes(4000), qos=1)


def arrow(broker: Holdfast, query: str) -> tuple[int, str]:
    """The status of an Arrow response, with its cursor or its error."""
    url = f"http://127.0.0.1:{broker.admin_port}/api/v1/log/records?{query}"
    request = urllib.request.Request(url, headers={"Accept": ARROW})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
            return answer.status, answer.headers["Holdfast-Next"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_removed_records_are_never_left_out_silently(start_holdfast: StartHoldfast) -> None:
    pytest.importorskip("pyarrow")
    small = {"segment_bytes": 65536, "snapshot_bytes": 65536, "partitions": 2}
    broker = start_holdfast({"log": small, "log.retention": {"bytes": 131072}})
    api = Api(broker.admin_port)
    publish(broker, "t", 10)
    page = api.get("log/records", order="oldest", kind="message", limit=2)
    partition = page["records"][0]["partition"]
    back = api.get("log/records", limit=2)["next"]
    status, following = arrow(broker, "rows=2")
    assert (status, bool(following), bool(page["next"])) == (200, True, True)

    def first() -> int:
        found: int = api.get("log")["ranges"][partition][0]
        return found

    publish(broker, "t", 200)
    until(lambda: first() > 10, "retention has removed the first messages")
    with pytest.raises(Refused, match="410: records behind this cursor were removed"):
        api.get("log/records", order="oldest", after=page["next"])
    status, text = arrow(broker, f"after={following}")
    assert (status, "removed by retention" in text) == (410, True)

    # What the request does not choose is no loss.
    get: Callable[..., Any] = api.get
    get("log/records", order="oldest", after=page["next"], partition=1 - partition)
    assert arrow(broker, f"after={following}&partition={1 - partition}")[0] == 200
    newest = get("log/records", limit=1)["records"][0]
    rest = get("log/records", order="oldest", after=page["next"], from_us=newest["at_us"])
    assert newest["offset"] in [each["offset"] for each in rest["records"]]
    # Backwards, the log ends where it begins now.
    assert get("log/records", after=back)["next"] == ""
    least = first()
    begin = get("log/records", order="oldest", partition=partition, limit=1)
    assert begin["records"][0]["offset"] >= least


def test_a_node_without_pyarrow_refuses_arrow_only(
    start_holdfast: StartHoldfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError('No module named pyarrow')\n")
    monkeypatch.setenv("HOLDFAST_TEST_PATH", str(tmp_path))
    broker = start_holdfast({})
    publish(broker, "t", 3)
    # More often than streams are allowed: a refusal does not count as one.
    for _ in range(6):
        status, text = arrow(broker, "filter=t")
        assert (status, "no pyarrow: install holdfast[arrow]" in text) == (406, True)
    assert len(Api(broker.admin_port).get("log/records", filter="t")["records"]) == 3
