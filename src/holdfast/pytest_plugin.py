"""Pytest plugin of an installed Holdfast: the fixtures `holdfast_broker` and
`make_holdfast_broker`.

pytest imports this module in every run on a machine with Holdfast. So it imports nothing of a
broker before a test requests a fixture.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from holdfast.testing import Broker


@pytest.fixture
def holdfast_broker(make_holdfast_broker: "Callable[..., Broker]") -> "Broker":
    """A running broker with an empty temporary data directory, one for each test."""
    return make_holdfast_broker()


@pytest.fixture
def make_holdfast_broker() -> "Iterator[Callable[..., Broker]]":
    """A function that starts a broker with the options of `holdfast.testing.Broker`. All of them
    stop at the end of the test."""
    from holdfast.testing import Broker

    with ExitStack() as brokers:
        yield lambda **options: brokers.enter_context(Broker(**options))
