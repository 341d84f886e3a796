"""Ports of test workers that run at the same time do not meet."""

import os

import pytest

from tests.support.ports import free_port


def test_forks_of_a_process_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for worker in ("gw3", "gw4"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, b" ".join(b"%d" % free_port() for _ in range(3)))
            os._exit(0)
        os.close(writing)
        found.append({int(each) for each in os.read(reading, 100).split()})
        os.close(reading)
        assert os.waitpid(pid, 0)[1] == 0
    own = {free_port() for _ in range(3)}
    assert len(found[0] | found[1] | own) == 9
    assert max(found[0]) < min(found[1])
