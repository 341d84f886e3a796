"""Fixtures that start brokers and always end them, by their own process ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.e2e.brokers import MOSQUITTO, Broker, Holdfast, Mosquitto


class StartHoldfast(Protocol):
    def __call__(
        self, settings: dict[str, dict[str, Any]] | None = None, data: Path | None = None
    ) -> Holdfast: ...


@pytest.fixture
def start_holdfast(tmp_path: Path) -> Iterator[StartHoldfast]:
    """Starts a broker that serves when the call returns. Its log must be free of tracebacks."""
    brokers: list[Holdfast] = []

    def start(
        settings: dict[str, dict[str, Any]] | None = None, data: Path | None = None
    ) -> Holdfast:
        directory = tmp_path / f"broker-{len(brokers)}"
        directory.mkdir()
        broker = Holdfast(directory, settings, data)
        brokers.append(broker)
        broker.start()
        return broker

    yield start
    for broker in brokers:
        broker.kill()
    for broker in brokers:
        assert "Traceback" not in broker.log_text(), broker.log_text()[-6000:]


@pytest.fixture
def broker(start_holdfast: StartHoldfast) -> Holdfast:
    return start_holdfast()


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    """Debian's Mosquitto: the tests' own clients and checkers must find it right, too."""
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    directory = tmp_path / "mosquitto"
    directory.mkdir()
    started = Mosquitto(directory)
    started.start()
    yield started
    started.kill()
