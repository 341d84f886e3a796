"""See holdfast.sim.disk."""

from holdfast.sim.disk import Crash, SimContent, SimDisk

__all__ = ["Crash", "SimContent", "SimDisk"]
