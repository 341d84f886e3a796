"""A real Prometheus scrapes a real broker, evaluates the alert rules and answers the dashboard."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.brokers import Holdfast
from tests.e2e.cluster_processes import until
from tests.interop.paho_client import Paho
from tests.support.ports import free_port
from tests.unit.deploy.test_monitoring import DASHBOARD, PROMETHEUS, panels

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")


class Prometheus:
    def __init__(self, directory: Path, target: int) -> None:
        text = (PROMETHEUS / "prometheus.yml").read_text()
        text = text.replace("18083", str(target)).replace(
            "scrape_interval: 15s", "scrape_interval: 200ms\n  evaluation_interval: 200ms"
        )
        (directory / "prometheus.yml").write_text(text)
        shutil.copy(PROMETHEUS / "alerts.yml", directory)
        self.port = free_port()
        arguments = [
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(PROGRAM), *arguments], stderr=log)

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply)["data"]
        except (ConnectionError, urllib.error.URLError):
            return None

    def value(self, query: str) -> float | None:
        data = self.ask("query", query=query)
        return float(data["result"][0]["value"][1]) if data and data["result"] else None


@pytest.fixture
def prometheus(broker: Holdfast, tmp_path: Path) -> Iterator[Prometheus]:
    if PROGRAM is None:
        pytest.skip("prometheus is not installed")
    directory = tmp_path / "prometheus"
    directory.mkdir()
    made = Prometheus(directory, broker.admin_port)
    yield made
    made.process.terminate()
    made.process.wait()


def test_a_scrape_with_everything(broker: Holdfast, prometheus: Prometheus) -> None:
    with Paho(broker.port, "reader") as reader, Paho(broker.port, "writer") as writer:
        reader.subscribe("t", 1)
        for _ in range(20):
            writer.publish("t", b"x", 1)
            reader.message()
    until(lambda: prometheus.value('up{job="holdfast"}') == 1.0, prometheus.log.read_text())
    counted = 'sum(holdfast_publish_received_total{qos="1"})'
    until(lambda: prometheus.value(counted) == 20.0, "all publishes are counted")
    assert (prometheus.value("holdfast_publish_acknowledge_seconds_count") or 0) > 0
    assert (prometheus.value("holdfast_publish_deliver_seconds_count") or 0) > 0
    assert (prometheus.value("process_resident_memory_bytes{job='holdfast'}") or 0) > 10e6
    assert prometheus.value('holdfast_build_info{python=~"3.*"}') == 1
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 20

    def evaluated() -> bool:
        groups = prometheus.ask("rules")["groups"]
        return all(rule["health"] == "ok" for group in groups for rule in group["rules"])

    until(evaluated, "every rule is evaluated without an error")
    # Before the first scrape no broker is there.
    until(lambda: prometheus.ask("alerts")["alerts"] == [], "no alert")
    for panel in panels(DASHBOARD):
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "1m").replace("$node", ".*")
            assert prometheus.ask("query", query=query.replace("$job", "holdfast")) is not None


def test_promtool_finds_no_fault_in_the_text(broker: Holdfast) -> None:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed")
    text = broker.admin("/metrics")[1]
    result = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    # Names that dashboards of users have stay, also where its style is another one.
    faults = [line for line in result.stderr.splitlines() if "should" not in line]
    assert faults == [], result.stderr
