"""I/O workers that the system does not let start."""

import asyncio
import subprocess
from typing import Any

import pytest

from holdfast.server.io_workers import pool
from holdfast.server.io_workers.pool import IoWorkers


def test_a_worker_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no memory or descriptor for a process. An exception of the timer would stop
    the broker, with the clients of all other workers."""
    start = subprocess.Popen
    failures = 2

    def lacking(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(12, "Cannot allocate memory")
        return start(*args, **kwargs)

    unexpected: list[dict[str, Any]] = []

    async def replace() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, each: unexpected.append(each))
        workers = IoWorkers()
        workers.start(1)
        try:
            (first,) = workers.process_ids
            monkeypatch.setattr(subprocess, "Popen", lacking)
            workers._workers[0].process.kill()
            async with asyncio.timeout(10):
                while first in workers.process_ids or not workers.process_ids:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            workers.close()

    monkeypatch.setattr(pool, "QUICK_S", 0.0)
    monkeypatch.setattr(pool, "RETRY_S", 0.01)
    asyncio.run(replace())
    assert not unexpected
    assert not failures
