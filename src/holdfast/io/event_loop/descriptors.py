"""Divides the process's file descriptors between clients and the broker.

Clients may use all but a reserve. The reserve belongs to the broker: segments, snapshots, reads of
the log, other nodes and the admin port. Without it, silent connections could take the descriptor
that the next segment needs.
"""

import logging
import resource
import threading
from errno import EMFILE
from typing import Final

from holdfast.log.files.filesystem import DESCRIPTORS

logger = logging.getLogger("holdfast")

RESERVE_MAX: Final = 512
"""The largest reserve in descriptors.

It is enough for 32 open segments, 64 readers of the log, 64 requests on the admin port, 64 nodes in
the handshake, a federation's links, and the broker's own files.
"""
RESERVE_MIN: Final = 64
UNLIMITED: Final = 1 << 30


def raise_limit() -> int:
    """Raises the soft limit to the hard one and returns the descriptors that are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems have a lower limit of their own below "unlimited".
    for wanted in (hard, 1 << 20, 10_240):
        if soft in (hard, resource.RLIM_INFINITY) or soft >= wanted > 0:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            logger.info("descriptor_limit_not_raised to=%d error=%r", wanted, str(error))
        else:
            break
    return limit()


def limit() -> int:
    """Returns the current limit of this process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def reserve() -> int:
    """Returns the number of descriptors that clients never use.

    It is a quarter of the limit, but at least 64 and at most 512. Below a limit of 128 it is half.
    """
    total = limit()
    return min(RESERVE_MAX, max(total // 4, min(RESERVE_MIN, total // 2)))


def for_clients() -> int:
    """Returns the number of client connections that the process allows."""
    return limit() - reserve()


def share(count: int) -> int:
    """Limits connections of one kind that use the reserve to `count` or an eighth of it."""
    return min(count, max(2, reserve() // 8))


def watch_files() -> None:
    """Makes threads that open a file of the log wait for a free descriptor.

    The event loop in the main thread does not wait, because while it waits no connection closes.
    """
    DESCRIPTORS.may_wait = _may_wait


def _may_wait(error: OSError, waited_s: float) -> bool:
    if waited_s == 0:
        scarce = "process" if error.errno == EMFILE else "machine"
        logger.error("no_descriptors_left of=%s file=%r limit=%d", scarce, error.filename, limit())
    return threading.current_thread() is not threading.main_thread()
