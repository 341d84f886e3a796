"""`holdfast completion`, in the shells that it is for."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.cli.completion import SHELLS, all_words
from holdfast.cli.main import COMMANDS, main

OPERATING = Path(__file__).parents[3] / "docs" / "operating.md"
DEADLINE_S = 20.0
PROMPT = "READY> "


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script of each shell, in a file."""
    directory = tmp_path_factory.mktemp("completion")
    words = all_words()
    found = {}
    for shell, lines in SHELLS.items():
        found[shell] = directory / shell
        found[shell].write_text("\n".join(lines(words)) + "\n")
    return found


class Terminal:
    """A shell that a person types into."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.process, self.end = pty.fork()
        if self.process == 0:
            os.chdir(directory)
            environment = {**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"}
            os.execvpe(command[0], command, environment)
        self.shown = ""

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self.end, text.encode())

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{text!r} is not in {self.shown!r}"
            if select.select([self.end], [], [], left_s)[0]:
                self.shown += os.read(self.end, 65536).decode(errors="replace")
        return self.shown

    def close(self) -> None:
        os.close(self.end)
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)


def test_each_command_and_option_is_known() -> None:
    words = all_words()
    assert set(words[""].words) == set(COMMANDS)
    assert {name for name in COMMANDS if name not in words} == set()
    assert words["serve"].values["--durability"].choices == ("fsync", "memory")
    assert words["serve"].values["-c"].kind == "file"
    assert words["serve"].values["--data"].kind == "dir"
    assert words["log inspect"].argument.kind == "dir"
    assert {"--server", "-t", "--cafile"} <= words["pub"].values.keys()
    assert words["sub"].values["--cafile"].kind == "file"
    assert "--retained-only" in words["sub"].options
    assert "--retained-only" not in words["sub"].values


def test_the_command_prints_it(
    scripts: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts["bash"].read_text()
    assert "source <(holdfast completion bash)" in OPERATING.read_text()


def test_bash(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder file.toml").touch()
    (tmp_path / "settings.toml").touch()
    shell = Terminal(["bash", "--norc", "--noprofile", "-i"], tmp_path)
    try:
        shell.type(f"PS1='{PROMPT[:2]}''{PROMPT[2:]}'; source {scripts['bash']}\n")
        shell.wait_for(PROMPT)
        for typed, completed in (
            ("holdfast comp", "letion "),
            ("holdfast cluster stat", "us "),
            ("holdfast cluster status --token", "-file "),
            ("holdfast serve --durability mem", "ory "),
            ("holdfast serve -c set", "tings.toml "),
            ("holdfast serve --port 1883 --data fol", "der/"),
            ("holdfast pub --caf", "ile "),
            ("holdfast completion fi", "sh "),
            ("holdfast config show -c folder\\ f", "ile.toml "),
        ):
            shell.type(f"{typed}\t")
            assert shell.wait_for(typed + completed).endswith(completed)
            shell.type("\x15")
            shell.type("echo do''ne\n")
            shell.wait_for("done")
            shell.wait_for(PROMPT)
        shell.type("holdfast log \t\t")
        shell.wait_for("verify")
        assert re.search(r"dump\s+.*inspect\s+.*tail", shell.shown)
    finally:
        shell.close()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "settings.toml").touch()

    def complete(line: str) -> list[str]:
        command = f"source {scripts['fish']}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", command],
            cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
        )  # fmt: skip
        assert not done.stderr
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    assert complete("holdfast clu") == ["cluster"]
    assert complete("holdfast cluster stat") == ["status"]
    assert complete("holdfast serve --durability ") == ["fsync", "memory"]
    assert complete("holdfast serve -c set") == ["settings.toml"]
    assert "--token-file" in complete("holdfast cluster status --tok")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(scripts: dict[str, Path], tmp_path: Path) -> None:
    shell = Terminal(["zsh", "-f", "-i"], tmp_path)
    try:
        shell.type(
            f"autoload -Uz compinit; compinit -u -D; source {scripts['zsh']}; echo re''ady\n"
        )
        shell.wait_for("ready")
        for typed, completed in (
            ("holdfast comp", "letion"),
            ("holdfast cluster stat", "us"),
            ("holdfast serve --durability mem", "ory"),
        ):
            shell.type(f"{typed}\t")
            shell.wait_for(completed)
            shell.type("\x15")
            shell.type("echo do''ne\n")
            shell.wait_for("done")
    finally:
        shell.close()
