"""docs/internals/cluster.md: each kind of frame is in the table of questions and replies."""

import re
from pathlib import Path

from holdfast.node import frame_kinds

PAGE = Path(__file__).parents[3] / "docs" / "internals" / "cluster.md"
KINDS = {
    name for name, value in vars(frame_kinds).items() if name.isupper() and value in range(256)
}


def test_the_table_has_each_kind_of_frame() -> None:
    _, _, text = PAGE.read_text().partition("## Replies between nodes\n")
    text, _, _ = text.partition("\n## ")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([A-Z0-9_]+)`", "".join(row[:2]))}
    assert named == KINDS
    assert len(KINDS) > 30
    for question, reply, belongs, late in rows:
        assert "none" in reply or (belongs.strip() and late.strip()), question
