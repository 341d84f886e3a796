"""The same fixtures as the interop tests: Holdfast, and Mosquitto to show that a test is right."""

from tests.interop.conftest import broker, unique

__all__ = ["broker", "unique"]
