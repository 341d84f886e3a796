"""Settings of all tests, and what is made once for many."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support import postgresql

# A busy machine is no defect: what is slow is found by benchmarks.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their parameter: all workers must collect the same names, and compressed
    bytes may hold the second in which they were made."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[postgresql.PostgresqlServer]:
    """Nobody may stop it: a test that does so makes one of its own."""
    if postgresql.missing():
        pytest.skip(postgresql.missing())
    with postgresql.running_server() as server:
        yield server
