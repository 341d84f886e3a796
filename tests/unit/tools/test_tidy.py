"""The tree against the limits of tools/tidy.py, and that tool against trees that exceed them."""

import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tidy = load()


def test_the_tree_is_tidy() -> None:
    assert tidy.main([]) == 0, "`make tidy` prints what to do"


def function(text: str) -> ast.FunctionDef:
    (found,) = ast.parse(text).body
    assert isinstance(found, ast.FunctionDef)
    return found


def test_a_function_is_measured_without_its_signature_and_docstring() -> None:
    assert (
        tidy.body_lines(function('def f(\n    a,\n):\n    """One.\n\n    Two."""\n    a\n    a'))
        == 2
    )
    assert tidy.body_lines(function('def f():\n    """Only."""')) == 0


@pytest.mark.parametrize(
    ("text", "in_class", "count"),
    [
        ("def f(a, b, /, c, *, d): ...", False, 3),
        ("def f(self, a): ...", True, 1),
        ("@staticmethod\ndef f(a, b): ...", True, 2),
    ],
)
def test_positional_parameters(text: str, in_class: bool, count: int) -> None:
    assert tidy.positional(function(text), in_class) == count


@pytest.mark.parametrize(
    ("name", "found"),
    [("Forwarding", False), ("Governing", True), ("arriving", True), ("Ring", False), ("A", False)],
)
def test_gerunds(name: str, found: bool) -> None:
    assert tidy.is_gerund(name) is found


def test_prose_is_comments_and_docstrings() -> None:
    text = '"""One.\n\nThree."""\nx = 1  # A comment.\n"""Of x."""\ny = 2\n'
    assert tidy.prose_lines(text, ast.parse(text)) == 5


def test_long_lines_of_a_document(tmp_path: Path) -> None:
    long = "word " * 30
    page = tmp_path / "page.md"
    page.write_text(f"{long}\n| {long} |\n```\n{long}\n```\nshort\n{'x' * 150}\n")
    assert tidy.long_lines(page) == 1


def test_the_list_only_shrinks() -> None:
    rules = {rule: {} for rule in tidy.LIMITS}
    now = rules | {"module_lines": {"a.py": 900, "b.py": 850}}
    listed = {"module_lines": {"a.py": 880, "b.py": 860, "c.py": 710}}
    worse, better = tidy.compare(now, listed)
    assert worse == ["a.py: module_lines is 900, at most 880 may be"]
    assert [line.split(":")[0] for line in better] == ["b.py", "c.py"]
    assert tidy.compare(now, {}) == (
        [
            "a.py: module_lines is 900, at most 700 may be",
            "b.py: module_lines is 850, at most 700 may be",
        ],
        [],
    )


def test_each_entry_has_a_reason() -> None:
    text = """
[class_name]
reason = "words of MQTT"
"Will" = 2

[module_lines]
"a.py" = { value = 410, reason = "one \\"subject\\"" }
"b.py" = 420
"""
    listed, reasons = tidy.parse(text)
    assert listed["module_lines"] == {"a.py": 410, "b.py": 420}
    assert tidy.unexplained(listed, reasons) == ["b.py: module_lines has no reason in tidy.toml"]
    assert tidy.parse(tidy.render(listed, reasons)) == (listed, reasons)


def test_each_pattern_of_the_makefile_matches_a_test() -> None:
    """A renamed test would run in the other form without a word."""
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    for name in ("INTERPRETED_FOLDERS", "INTERPRETED_FILES", "COMPILED_FILES", "BOTH"):
        (patterns,) = re.findall(rf"^{name} := (.*)$", makefile, re.MULTILINE)
        tests = ROOT / "tests" / "unit" if name == "INTERPRETED_FOLDERS" else ROOT / "tests"
        assert not [each for each in patterns.split() if not list(tests.glob(each))]
    # Those that a target names, in full.
    named = re.findall(r"(?<![\w/])tests/[\w/]+(?:\.py)?", makefile)
    assert "tests/unit/api/test_console_files.py" in named
    assert not [each for each in named if not (ROOT / each).exists()]


def test_test_files_outside_packages_have_different_names() -> None:
    """Pytest collects neither of two that have one name, in any run that has both."""
    paths = (ROOT / "tests").rglob("test_*.py")
    names = Counter(path.name for path in paths if not path.with_name("__init__.py").exists())
    assert not [name for name, count in names.items() if count > 1]
