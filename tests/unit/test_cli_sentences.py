"""The texts of the commands about resources."""

import pytest

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
