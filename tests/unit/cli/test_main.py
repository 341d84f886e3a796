"""The `holdfast` command: which words it knows, what it prints, how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import main as cli

SOURCE = Path(holdfast.__file__).parents[1]


def holdfast_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"holdfast {holdfast.__version__} (")
    assert "compiled, " in line or "interpreted, " in line
    assert "Python" in line
    assert "uvloop" in line or "asyncio" in line


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.EXIT_USAGE
    shown = capsys.readouterr().err
    for name in cli.COMMANDS:
        assert f"\n  {name} " in shown


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bogus", "--port", "1"])
    assert caught.value.code == cli.EXIT_USAGE
    assert "unknown command 'bogus'; choose from serve, pub, sub" in capsys.readouterr().err


def test_an_unknown_option_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["cluster", "status", "--port", "1"])
    assert ended.value.code == cli.EXIT_USAGE
    shown = capsys.readouterr().err
    assert shown.startswith("usage: holdfast cluster status ")
    assert shown.endswith("holdfast cluster status: error: unrecognized arguments: --port 1\n")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main([command, "--help"])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 0
    assert f"holdfast {command}" in capsys.readouterr().out


def test_wrong_configuration_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "holdfast.toml"
    path.write_text("[limits]\nqos_max = 3\n")
    finished = holdfast_command("serve", "-c", str(path), "--check-config")
    assert finished.returncode == cli.EXIT_USAGE
    assert finished.stderr == (
        f"holdfast: {path}: limits.qos_max = 3: must be a whole number from 0 to 2\n"
    )


def test_reader_that_goes_away_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", "--version"],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=write_end,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (finished.returncode, finished.stderr) == (cli.EXIT_PIPE, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_standard_stream_is_the_null_device(closed: str) -> None:
    program = "import os, sys; from holdfast.cli import main; code = main.main(['--version'])"
    program += "; [os.fstat(each.fileno()) for each in (sys.stdin, sys.stdout, sys.stderr)]"
    finished = subprocess.run(
        [
            "sh",
            "-c",
            f'exec "$@" {closed}',
            "sh",
            sys.executable,
            "-c",
            f"{program}; sys.exit(code)",
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, b"")


INTERRUPTED = """
import signal, sys, time
from holdfast.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it


class Response:
    def __del__(self) -> None:
        if sys.argv[1] == "raise":
            raise ValueError("what a destructor says")
        signal.raise_signal(signal.SIGINT if sys.argv[1] == "interrupt" else signal.SIGTERM)


class Terminated(BaseException):
    number = signal.SIGTERM


def terminate(*_) -> None:
    raise Terminated


signal.signal(signal.SIGTERM, terminate)


def run(arguments: list[str]) -> int:
    Response()
    time.sleep(0 if sys.argv[1] == "raise" else 20)
    return 0


main._dispatch = run
try:
    sys.exit(main.main([]))
except Terminated:
    sys.exit(7)
"""


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    """Python drops it, and `watch` and `sub` would go on until the next one."""
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run([*command, "interrupt"], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    done = subprocess.run([*command, "terminate"], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "")
    done = subprocess.run([*command, "raise"], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert "what a destructor says" in done.stderr


def test_publishing_does_not_load_what_it_does_not_need() -> None:
    """Starting fast is part of being usable in a shell loop."""
    heavy = ["msgspec", "uvicorn", "starlette", "prometheus_client", "stringprep"]
    program = (
        "import sys; from holdfast.cli.pubsub import pub, sub; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stdout == "[]\n"


def test_publishing_starts_quickly() -> None:
    """CPU beyond the bare interpreter; the bound leaves room for a slow machine."""

    def cpu_s(program: str) -> float:
        before = os.times()
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=60,
            check=True,
        )
        after = os.times()
        return after.children_user - before.children_user

    spent = min(cpu_s("import holdfast.cli.pubsub.pub") - cpu_s("pass") for _ in range(3))
    assert spent < 0.3
