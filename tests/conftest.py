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


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[postgresql.PostgresqlServer]:
    """Nobody may stop it: a test that does so makes one of its own."""
    if postgresql.missing():
        pytest.skip(postgresql.missing())
    with postgresql.running_server() as server:
        yield server
