"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine is no defect: what is slow is found by benchmarks.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are named by their parameter: all workers must collect the same names, and compressed
    bytes may hold the second in which they were made."""
    return argname if isinstance(val, bytes) else None
