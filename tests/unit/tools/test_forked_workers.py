"""The workers of `make test`: every test runs once, and what ends a worker fails one test."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

PROGRAM = Path(__file__).parents[3] / "tools" / "forked_workers.py"
TESTS = """
import os, random, sys
import pytest

COLLECTED_BY = os.getpid()

@pytest.fixture(scope="module")
def both(tmp_path_factory):
    directory = tmp_path_factory.mktemp("both")
    yield directory
    with open("torn_down", "a") as file:
        print(os.getpid(), file=file)

@pytest.mark.parametrize("number", range(30))
def test_one(number, both, tmp_path, capfd):
    assert os.getpid() != COLLECTED_BY
    assert both.parent == tmp_path.parent
    os.write(1, b"%d" % number)
    assert capfd.readouterr().out == str(number)
    with open("ran", "a") as file:
        print(os.getpid(), number, random.random(), file=file)

def test_ends_its_process():
    if "dies" in os.environ:
        os.kill(os.getpid(), 9)

def test_fails():
    print("said")
    assert "fails" not in os.environ

@pytest.mark.parametrize("number", range(30, 40))
def test_two(number):
    with open("ran", "a") as file:
        print(os.getpid(), number, random.random(), file=file)
"""


def run(directory: Path, causes: list[str], *options: str) -> tuple[int, str]:
    (directory / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "-q", "--junitxml=report.xml", *options, "test_it.py"],
        cwd=directory, env=os.environ | dict.fromkeys(causes, "1"),
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_each_test_runs_once_in_one_of_the_forks(tmp_path: Path) -> None:
    code, out = run(tmp_path, [], "--workers", "3")
    assert code == 0, out
    assert "42 passed" in out
    lines = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(int(number) for _, number, _ in lines) == list(range(40))
    assert len({value for _, _, value in lines}) == 40, "forks with the same random numbers"
    used = {pid for pid, number, _ in lines if int(number) < 30}
    assert set((tmp_path / "torn_down").read_text().split()) == used


def test_what_ends_a_worker_fails_one_test(tmp_path: Path) -> None:
    code, out = run(tmp_path, ["dies", "fails"], "--workers", "2")
    assert code == 1, out
    assert "2 failed, 40 passed" in out
    assert "the process of this test ended with exit code -9" in out
    assert "said" in out
    numbers = [int(line.split()[1]) for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(numbers) == list(range(40))
    cases = ElementTree.parse(tmp_path / "report.xml").iter("testcase")
    assert sum(case.find("failure") is not None for case in cases) == 2


def test_the_first_failure_may_stop_the_run(tmp_path: Path) -> None:
    code, out = run(tmp_path, ["fails"], "--workers", "1", "-x")
    assert code == 1, out
    assert "1 failed, 31 passed" in out
    assert len(set((tmp_path / "torn_down").read_text().split())) == 1
