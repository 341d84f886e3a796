"""Each command of the pipeline in the documents is one that the program takes."""

import re
import shlex
from pathlib import Path

import pytest

from holdfast.cli.main import build_parser

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"holdfast pipeline (?:[a-z]|--)[^`#|]*")
COMMANDS_MIN = 30


def commands(text: str) -> list[str]:
    """Those of blocks, one a line, and those between backticks."""
    inner = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = [each for code in re.findall(r"`([^`]+)`", inner) for each in COMMAND.findall(code)]
    for block in re.findall(r"```(?:bash|sh|console|ini|text)?\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found += COMMAND.findall(line)
    return [" ".join(each.split()) for each in found]


def test_the_documents_have_many() -> None:
    assert sum(len(commands(page.read_text())) for page in PAGES) >= COMMANDS_MIN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_takes_them(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page.read_text()):
        words = shlex.split(command)[1:]
        if len(words) == 2:
            words.append("--help")  # only the name of a command
        code: object = 0
        try:
            build_parser(["pipeline"]).parse_args(words)
        except SystemExit as end:
            code = end.code
        assert code == 0, f"{command}: {capsys.readouterr().err.splitlines()[-1]}"
