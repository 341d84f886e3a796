"""The texts of the commands about resources."""

from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.cli.resources.sentences import group


@pytest.mark.parametrize(
    ("log_lag", "text"), [(-1, "-"), (0, "0 records"), (1, "1 record"), (2, "2 records")]
)
def test_a_group_is_behind_by_a_counted_noun(log_lag: int, text: str) -> None:
    row = {
        "group": "$share/g/t",
        "coordinator": "n1",
        "log_lag": log_lag,
        "member_count": 0,
        "connected_count": 0,
    }
    reply = {"group": row, "oldest": None, "oldest_is_known": True, "members": []}
    lines = group(reply).splitlines()
    assert f"behind       {text}" in lines
    assert "oldest       -, nothing is unfinished" in lines


@pytest.mark.parametrize("content", ["{}", "[]", "5", "", '{"deleted": [', "\xff"])
def test_a_file_that_restores_nothing_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deleted.json"
    path.write_text(content, encoding="latin-1")
    assert main(["retained", "restore", str(path), "--admin", "127.0.0.1:1"]) == 2
    assert f"holdfast: {path} is not what " in capsys.readouterr().err
