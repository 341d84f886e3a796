"""The conformance table: tags found in their functions, wrong ones refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.conformance import (
    STATEMENTS,
    Statement,
    Tag,
    find_tags,
    read_statements,
    render,
    sort_key,
    unknown_tags,
)

# Put together, so that the tool, which reads this file too, does not take them for tags.
A, B, OLD, UNKNOWN = (
    f"[{text}]" for text in ("MQTT-3.1.2-4", "MQTT-4.4.0-1", "MQTT3-3.3.5-2", "MQTT-3.1.2-99")
)

SOURCE = f'''"""Module. {A}"""

X = 1  # {OLD}


def outer() -> None:
    def inner() -> None:
        pass  # {A} {B}


class Thing:
    """{B}"""

    @decorated("{A}")
    async def method(self) -> None:
        """Text."""
'''


def test_find_tags() -> None:
    assert list(find_tags(SOURCE, "f.py")) == [
        Tag("MQTT-3.1.2-4", "f.py", ""),
        Tag("MQTT3-3.3.5-2", "f.py", ""),
        Tag("MQTT-3.1.2-4", "f.py", "outer.inner"),
        Tag("MQTT-4.4.0-1", "f.py", "outer.inner"),
        Tag("MQTT-4.4.0-1", "f.py", "Thing"),
        Tag("MQTT-3.1.2-4", "f.py", "Thing.method"),
    ]


@pytest.mark.parametrize("wrong", ["MQTT-3.1.2", "MQTT 3.1.2-4", "MQTT5-3.1.2-4", "MQTT-3.1.2-*"])
def test_almost_a_tag(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"f\.py:1"):
        list(find_tags(f"x = 1  # [{wrong}]\n", "f.py"))


def test_all_statements_are_listed() -> None:
    statements = read_statements(STATEMENTS.read_text())
    assert list(statements) == sorted(statements, key=sort_key)
    numbers: dict[str, list[int]] = {}
    for statement in statements.values():
        section, _, number = statement.number.partition("-")
        numbers.setdefault(section, []).append(int(number))
    # Numbers run on within a section. 2.2.1-1 does not exist in MQTT 5.0.
    for section, found in numbers.items():
        first = 2 if section == "2.2.1" else 1
        assert found == list(range(first, first + len(found))), section


@pytest.mark.parametrize(
    "line", ["3.1.2-4 nobody words", "3.1.2 both words", "1.1.1-1 both a\n" * 2]
)
def test_wrong_statement(line: str) -> None:
    with pytest.raises(ValueError):
        read_statements(line)


def test_render_and_unknown() -> None:
    statements = {
        "MQTT-3.1.2-4": Statement("3.1.2-4", "both", "clean start"),
        "MQTT-4.4.0-1": Statement("4.4.0-1", "server", "resend"),
    }
    met = [Tag("MQTT-3.1.2-4", "src/holdfast/node/a.py", "run")] * 2
    shown = [Tag("MQTT-3.1.2-4", "tests/unit/b.py", "")]
    text = render(statements, met, shown)
    assert "| MQTT-3.1.2-4 | both | clean start | `node/a.py: run` | `unit/b.py` |" in text
    assert "| MQTT-4.4.0-1 | server | resend |" in text.split("without a tag")[1]
    assert unknown_tags(statements, [*met, Tag("MQTT-3.1.2-99", "x.py", "")]) == [
        f"x.py: {UNKNOWN} is not a statement of MQTT 5.0"
    ]
    assert unknown_tags(statements, [Tag("MQTT3-9.9.9-9", "x.py", "")]) == []


def test_the_table_is_that_of_the_tree() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(root / "tools" / "conformance.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # `python tools/conformance.py` writes it
