"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine is no defect: what is slow is found by benchmarks.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
