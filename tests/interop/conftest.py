"""Brokers for public clients to talk to: Holdfast, and Mosquitto to show that the test is right."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.brokers import MOSQUITTO, Broker, Holdfast, Mosquitto


@pytest.fixture(scope="module", params=["holdfast", "mosquitto"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    """One broker a module; tests keep apart by client ids and topics of their own."""
    directory = tmp_path_factory.mktemp(request.param)
    started: Broker
    if request.param == "holdfast":
        started = Holdfast(directory)
    elif MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    else:
        started = Mosquitto(directory)
    started.start()
    yield started
    started.kill()
    assert "Traceback" not in started.log_text(), started.log_text()[-6000:]


@pytest.fixture
def holdfast_broker(tmp_path: Path) -> Iterator[Holdfast]:
    started = Holdfast(tmp_path)
    started.start()
    yield started
    started.kill()
    assert "Traceback" not in started.log_text(), started.log_text()[-6000:]


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A name of this test's own, fit for client ids and topics."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
