"""A missing descriptor passes: it is waited for, and never counts as a failed disk."""

import ast
import errno
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.io.event_loop import descriptors
from holdfast.log.files import filesystem
from holdfast.log.files.filesystem import DESCRIPTORS, OPEN_WAIT_S, OsFileSystem, is_scarce
from tests.unit.io.disk.test_journal_writer import Bench


@pytest.fixture(autouse=True)
def unwatched() -> Iterator[None]:
    yield
    DESCRIPTORS.may_wait = None


class Scarce(OsFileSystem):
    """Creates no file until `missing` attempts have failed."""

    def __init__(self, root: Path, missing: int) -> None:
        super().__init__(root)
        self.missing = missing

    def open_write(self, name: str, *, create: bool) -> filesystem.OsWriteFile:
        if name.startswith("journal/") and self.missing:
            self.missing -= 1
            raise OSError(errno.EMFILE, "no descriptors", name)
        return super().open_write(name, create=create)


def test_a_segment_waits_for_a_descriptor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Scarce(tmp_path, 2))
    bench.submit()
    bench.loop.run_one()
    bench.writer.close()
    assert bench.events == ["written"]
    assert caplog.text.count("journal_waits_for_descriptor") == 2


def test_closing_gives_up_what_waits_for_a_descriptor(tmp_path: Path) -> None:
    bench = Bench(Scarce(tmp_path, 1 << 30))
    bench.submit()
    bench.writer.close()
    assert bench.events == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_opening_is_repeated(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(filesystem.time, "sleep", slept.append)
    asked: list[float] = []

    def may_wait(error: OSError, waited_s: float) -> bool:
        asked.append(waited_s)
        return True

    DESCRIPTORS.may_wait = may_wait
    left = 3

    def take() -> str:
        nonlocal left
        if left:
            left -= 1
            raise OSError(number, "none left")
        return "taken"

    waits = DESCRIPTORS.waits
    assert DESCRIPTORS.once_free(take) == "taken"
    assert len(slept) == len(asked) == 3
    assert asked[0] == 0
    assert DESCRIPTORS.waits == waits + 1


def test_opening_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(filesystem.time, "sleep", slept.append)
    DESCRIPTORS.may_wait = lambda error, waited_s: True

    def take() -> str:
        raise OSError(errno.EMFILE, "none left")

    with pytest.raises(OSError) as caught:
        DESCRIPTORS.once_free(take)
    assert is_scarce(caught.value)
    assert OPEN_WAIT_S <= sum(slept) < OPEN_WAIT_S + 2


def test_other_errors_are_raised_at_once(tmp_path: Path) -> None:
    DESCRIPTORS.may_wait = lambda error, waited_s: True
    with pytest.raises(FileNotFoundError):
        OsFileSystem(tmp_path).open_read("missing")


def test_only_other_threads_wait() -> None:
    """While the event loop waited, no connection would be closed."""
    descriptors.watch_files()
    may_wait = DESCRIPTORS.may_wait
    assert may_wait is not None
    error = OSError(errno.EMFILE, "none left")
    found: list[bool] = [may_wait(error, 0.0)]
    thread = threading.Thread(target=lambda: found.append(may_wait(error, 0.0)))
    thread.start()
    thread.join()
    assert found == [False, True]


def test_every_opening_of_the_file_system_waits() -> None:
    """os.open and os.listdir take a descriptor; nothing in the module calls them directly."""
    path = filesystem.__file__
    assert path is not None
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(Path(path).with_suffix(".py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "os"
    ]
    assert not {"open", "listdir", "scandir", "walk", "fdopen", "dup"} & set(calls)


def test_no_limit_is_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (unlimited, unlimited))
    assert descriptors.for_clients() > 1 << 20


def test_the_limit_is_raised_as_far_as_the_system_lets(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS: the hard limit is none, and cannot be had."""
    have = [256]

    def set_limit(which: int, limits: tuple[int, int]) -> None:
        if limits[0] < 0 or limits[0] > 12_000:
            raise ValueError("too many")
        have[0] = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda which: (have[0], resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert descriptors.raise_limit() == 10_240
    assert descriptors.raise_limit() == 10_240


@pytest.mark.parametrize(
    ("limit", "reserve"), [(100, 50), (120, 60), (256, 64), (1024, 256), (1 << 20, 512)]
)
def test_reserve(monkeypatch: pytest.MonkeyPatch, limit: int, reserve: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert descriptors.reserve() == reserve
    assert descriptors.for_clients() == limit - reserve
    assert 2 <= descriptors.share(64) <= max(2, reserve // 8)
