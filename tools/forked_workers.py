"""Run pytest, with the tests in forks of the process that has collected them.

    python tools/forked_workers.py --workers 4 tests -m "not spark"

To import and collect all tests takes 20 s of CPU, and each worker of pytest-xdist does it again.
Here it is done once. Each worker begins with tests that follow each other. One that has none left
takes half of those that another has not begun. A worker that ends within a test fails that test,
and another one goes on.
"""

import atexit
import gc
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from _pytest.junitxml import xml_key

INTERRUPTED_S: Final = 10.0
"""For the test that a worker runs at an interrupt, before the worker is killed."""


class Reports:
    """Collects what is reported of a test in the process that runs it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        self.found.append(hook.pytest_report_to_serializable(config=self.config, report=report))


class Worker:
    """A fork that runs one test at a time, as the process that orders it sees it.

    A test is ordered together with the one after it, because what both share stays set up between
    them. So the one after it is no other worker's any more.
    """

    def __init__(self, number: int, session: pytest.Session, base: Path) -> None:
        self.number = number
        self.pending: deque[int] = deque()
        self.running: int | None = None
        self.following: int | None = None
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            _work(number, session, base, theirs)
        theirs.close()
        self.ended = os.pidfd_open(self.pid)

    def order(self, others: list["Worker"]) -> None:
        """Order the next test, or the end if there is none."""
        self.running = self.following
        if self.running is None:
            self.running = self._take(others)
        self.following = None if self.running is None else self._take(others)
        try:
            self.connection.send(None if self.running is None else (self.running, self.following))
        except BrokenPipeError:
            pass  # it has ended, which the descriptor of the process says as well

    def _take(self, others: list["Worker"]) -> int | None:
        if not self.pending:
            longest = max((each.pending for each in others), key=len, default=self.pending)
            taken = [longest.pop() for _ in range((len(longest) + 1) // 2)]
            self.pending.extend(reversed(taken))
        return self.pending.popleft() if self.pending else None

    def wait_for_end(self) -> int:
        os.close(self.ended)
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkedWorkers:
    """The plugin: an option, and the loop over the tests."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--workers", type=int, default=0, help="forks that run the tests")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        options = session.config.option
        if options.workers < 1 or options.collectonly or session.testsfailed:
            return None  # pytest's own loop
        # A fork has only the thread that made it.
        assert threading.active_count() == 1, threading.enumerate()
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        # What is collected lives until the end, and its pages stay shared.
        gc.collect()
        gc.freeze()
        workers: list[Worker] = []
        try:
            count = min(options.workers, len(session.items))
            for number in range(count):
                workers.append(Worker(number, session, base))
                first, last = (len(session.items) * each // count for each in (number, number + 1))
                workers[-1].pending.extend(range(first, last))
            for worker in workers:
                worker.order(workers)
            self._run(session, base, workers)
        finally:  # none is left, unless this loop was interrupted
            for worker in workers:
                worker.connection.close()
            for worker in workers:
                if not wait([worker.ended], INTERRUPTED_S):
                    os.kill(worker.pid, signal.SIGKILL)
                worker.wait_for_end()
        return True

    def _run(self, session: pytest.Session, base: Path, workers: list[Worker]) -> None:
        while workers:
            ready = wait([each for worker in workers for each in (worker.connection, worker.ended)])
            for worker in list(workers):
                if worker.connection in ready:
                    try:
                        reports = worker.connection.recv()
                    except (EOFError, ConnectionResetError):
                        pass  # its end follows
                    else:
                        self._tell(session, worker.running, reports)
                        worker.order(workers)
                        continue
                if worker.ended in ready:
                    workers.remove(worker)
                    code = worker.wait_for_end()
                    if worker.running is None and not worker.pending:
                        continue
                    self._tell_of_end(session, worker.running, code)
                    another = Worker(worker.number, session, base)
                    another.pending = worker.pending
                    another.following = worker.following
                    workers.append(another)
                    another.order(workers)

    def _tell(self, session: pytest.Session, index: int | None, reports: list[Any]) -> None:
        """Report on a test as if it had run in this process."""
        assert index is not None
        item = session.items[index]
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for each in reports:
            report = hook.pytest_report_from_serializable(config=session.config, data=each)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _tell_of_end(self, session: pytest.Session, index: int | None, code: int) -> None:
        assert index is not None
        item = session.items[index]
        text = f"the process of this test ended with exit code {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        hook = session.config.hook
        serialized = hook.pytest_report_to_serializable(config=session.config, report=report)
        self._tell(session, index, [serialized])


def _work(number: int, session: pytest.Session, base: Path, orders: Connection) -> NoReturn:
    """Run what is ordered, then end this process, which is a fork."""
    code = 1
    try:
        atexit._clear()  # what the other process does at its end
        _have_own_files(session.config, base / f"worker-{number}-{os.getpid()}")
        os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # for the ports
        random.seed()
        _run_ordered(session, orders)
        atexit._run_exitfuncs()
        code = 0
    except (EOFError, KeyboardInterrupt):
        session._setupstate.teardown_exact(None)  # the process that orders has stopped
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def _have_own_files(config: pytest.Config, base: Path) -> None:
    """Replace what forks would share: captured output, a directory, what pytest writes itself."""
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.option.basetemp = str(base)
    factory = pytest.TempPathFactory.from_config(config, _ispytest=True)
    config._tmp_path_factory = factory  # type: ignore[attr-defined]
    if (report := config.stash.get(xml_key, None)) is not None:
        config.pluginmanager.unregister(report)


def _run_ordered(session: pytest.Session, orders: Connection) -> None:
    config = session.config
    reports = Reports(config)
    config.pluginmanager.register(reports)
    while (order := orders.recv()) is not None:
        index, following = order
        after = None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=after)
        orders.send(reports.found)
        reports.found = []


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # as `python -m pytest` has it
    sys.exit(pytest.main(sys.argv[1:], plugins=[ForkedWorkers()]))
