"""See tests.sim.disk."""

from tests.sim.disk import Crash, SimContent, SimDisk

__all__ = ["Crash", "SimContent", "SimDisk"]
