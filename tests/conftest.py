"""Settings of all tests."""

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no defect: what is slow is found by benchmarks.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """No collection traverses the modules and tests, which stay: each worker has 400,000 objects of
    them. To traverse them while they are made takes a sixth of the time."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their parameter: all workers must collect the same names, and compressed
    bytes may hold the second in which they were made."""
    return argname if isinstance(val, bytes) else None
