"""ARCHITECTURE.md, docs/internals/ and the glossary name only files, modules and classes that are
there.

In backticks, and in diagrams for paths:

- a path (`x/y.py`, `tests/...`, `docs/...`, a folder with `/` at its end) is relative to
  src/holdfast or to the repository;
- a dotted name (`node.cluster_node.ClusterNode`, `Journal.close_write_group`, `commands.apply`) is
  a module, or ends of one, with what is in it;
- a name in capital letters or camel case is a class or a constant;
- a name that begins with `test_` is that of a test (`tests/unit/test_trust.py`);
- any other word is the name of a package, module, function, constant or field.

So a document fails with the first name that a change of the tree has left behind.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tests.support import source_tree
from tests.support.source_tree import statements

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
MAP = ROOT / "ARCHITECTURE.md"
WHERE = ROOT / "docs" / "internals" / "where.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [MAP, GLOSSARY, *sorted((ROOT / "docs" / "internals").glob("*.md"))]
INTERNALS = {
    "storage", "broker", "cluster", "federation", "pipeline", "client", "simulator", "transcripts",
    "formats", "trust", "where",
}  # fmt: skip
WORDS_MAX = 1200
LINES_MAX = 120
ROW_WORDS_MAX = 60

QUESTIONS = (
    "retained message stored", "PUBACK wait for fsync", "authentication method",
    "Raft election", "disk hangs", "member of a shared subscription", "Spark partition planned",
    "payload decoder", "HTTP admin endpoint", "next hop computed", "publish queue stored on disk",
    "message expiry enforced", "reply for the whole cluster", "screen of the console",
    "taken over by another node", "will published", "gateway get its clients", "replica placed",
    "torn write", "go on after a crash",
)  # fmt: skip

FILES = {
    "manifest.json", "epoch.json", "manager.json", "lock", "watermarks", "setup.py", "epochs",
    "journal/", "snapshots/", "quarantine/", "lease/", "journal/start.json", "raft/",
    "access.json", "lake.json", "backup.json",
}  # fmt: skip
"""Files and folders of a data directory, a lake and a backup."""
WORDS = {"start offsets", "open", "asyncio", "mqtt", "merges", "holdfast", "leave"}
"""Values in files or on the wire, programs and libraries."""

PATH = re.compile(r"\w[\w.-]*(?:/[\w.-]+)*/?")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?")
NAME = re.compile(r"[A-Za-z_]\w*(?:\(\))?")
ASSIGNMENT = ast.Assign | ast.AnnAssign
TOP = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__"}
FOLDERS = {"src", "tests", "docs", "bench", "tools", "examples", "deploy"}


def backticked(text: str) -> Iterator[str]:
    """What stands in backticks outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"`([^`]+)`", prose):
        yield " ".join(found.split())


def blocks(text: str) -> Iterator[str]:
    """Code blocks: the diagrams."""
    yield from re.findall(r"^```.*?^```", text, flags=re.MULTILINE | re.DOTALL)


def is_path(name: str) -> bool:
    return bool(PATH.fullmatch(name)) and ("/" in name or name.endswith((".py", ".md", ".toml")))


def is_there(name: str) -> bool:
    if name in FILES:
        return True
    return any(
        (base / name).is_dir() if name.endswith("/") else (base / name).is_file()
        for base in (SOURCE, SOURCE.parent, ROOT)
    )


def members(node: ast.ClassDef | ast.Module) -> dict[str, ast.AST]:
    """What a module or class has: definitions, constants, fields and attributes of `self`."""
    found: dict[str, ast.AST] = {}
    for each in ast.walk(node):
        if (
            isinstance(node, ast.ClassDef)
            and isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and ast.unparse(each.value) == "self"
        ):
            found.setdefault(each.attr, each)
    for each in node.body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[each.name] = each
        elif isinstance(each, ASSIGNMENT):
            found.update(dict.fromkeys(names_of(each), each))
    return found


def names_of(node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    """What an assignment gives a value to, attributes left out."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name):
            yield target.id


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name below holdfast -> the module."""
    return {
        name.removesuffix(".py").replace("/", "."): ast.parse(path.read_text())
        for name, path in source_tree.modules()
    }


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for tree in modules().values():
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def words() -> frozenset[str]:
    """Names of packages, modules, functions, constants and fields. Not those of attributes and
    parameters: they may keep the name that a class has had before."""
    found = {part for name in modules() for part in name.split(".")}
    found.update(path.name for path in SOURCE.parent.glob("holdfast*"))
    for tree in modules().values():
        for node in (tree, *statements(tree)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef | ast.Module):
                found.update(chain(*(names_of(e) for e in node.body if isinstance(e, ASSIGNMENT))))
    return frozenset(found)


@cache
def support_words() -> frozenset[str]:
    """Names of functions and classes of the simulator and of what tests have in common."""
    return frozenset(
        each.name
        for folder in ("sim", "support")
        for path in (ROOT / "tests" / folder).glob("*.py")
        for each in statements(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef | ast.FunctionDef)
    )


def bases(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """The class and, by name, those that it derives from."""
    yield node
    for base in node.bases:
        for each in classes().get(ast.unparse(base).split("[")[0], []):
            if each.name != node.name:
                yield from bases(each)


def has_chain(node: ast.AST, names: list[str]) -> bool:
    """Is the first of `names` in the module or class, the next one in that, and so on?"""
    if not names:
        return True
    if isinstance(node, ast.Module):
        found = members(node).get(names[0])
        return found is not None and has_chain(found, names[1:])
    if isinstance(node, ast.ClassDef):
        return any(names[0] in members(each) for each in bases(node)) and len(names) == 1
    return False


def resolves(name: str) -> bool:
    parts = name.removesuffix("()").split(".")
    if parts[0] in ("tests", "bench"):
        folder = ROOT.joinpath(*parts)
        return folder.is_dir() or folder.with_suffix(".py").is_file()
    parts = parts[1:] if parts[0] == "holdfast" else parts
    if any(has_chain(each, parts[1:]) for each in classes().get(parts[0], [])):
        return True
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for module, tree in modules().items():
            full = module.removesuffix(".__init__")
            # A package of the tree is named from its top; a module may be named alone.
            fits = full == prefix or (parts[0] not in TOP and full.endswith("." + prefix))
            if fits and has_chain(tree, parts[end:]):
                return True
    return False


def problems(text: str) -> Iterator[str]:
    for name in backticked(text):
        if name in FILES | WORDS or name.startswith(("$", "/")):
            continue
        if is_path(name):
            if not is_there(name):
                yield f"{name}: no such file"
        elif DOTTED.fullmatch(name):
            if not resolves(name):
                yield f"{name}: nothing of that name"
        elif NAME.fullmatch(name) and not name.startswith("test_"):
            bare = name.removesuffix("()")
            if bare not in words() and bare not in classes() and bare not in support_words():
                yield f"{name}: nothing of that name"
    for block in blocks(text):
        for name in re.findall(r"\w+(?:/\w+)+(?:\.py)?", block):
            if name.split("/")[0] in TOP | FOLDERS and not (is_there(name) or is_there(name + "/")):
                yield f"{name}: no such file, in a diagram"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_are_there(page: Path) -> None:
    assert list(problems(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "stale",
    [
        "node/publishing.py", "cluster/forwarding.py", "docs/internals/node.md", "replication/",
        "tests/unit/test_nothing.py", "cluster.forwarding", "cluster.publish.sending",
        "journal.Journal.taken", "Member.handle_disk", "NodeState.holds", "Homes", "useless_nodes",
        "broker.session.session.Session.inflights", "HELD_BYTES_MOST",
    ],
)  # fmt: skip
def test_a_stale_name_is_found(stale: str) -> None:
    assert len(list(problems(f"a\n`{stale}`\nb"))) == 1


def test_a_diagram_is_read() -> None:
    assert list(problems('```mermaid\nA["node/forwarding.py"]\n```\n'))
    assert not list(problems('```mermaid\nA["node/publish/forwarding.py"]\n```\n'))


def test_internals_are_complete() -> None:
    assert {page.stem for page in PAGES if page.parent.name == "internals"} == INTERNALS


def test_the_map_is_short() -> None:
    text = MAP.read_text()
    assert len(text.split()) <= WORDS_MAX
    assert text.count("\n") <= LINES_MAX
    for page in INTERNALS:
        assert f"docs/internals/{page}.md" in text


def test_every_package_is_on_the_map() -> None:
    text = MAP.read_text()
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert {name for name in packages if f"\n| `{name}/` |" not in text} == set()


def questions() -> dict[str, str]:
    """The rows of the table of questions: question -> answer."""
    text = WHERE.read_text()
    part = text.split("## A newcomer's questions")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("| ")
    ]
    return {question: answer for question, answer in rows if question.endswith("?")}


def test_a_newcomers_questions_are_answered() -> None:
    found = questions()
    assert len(found) == len(QUESTIONS)
    for words_of in QUESTIONS:
        answer = next((found[each] for each in found if words_of in each), None)
        assert answer is not None, words_of
        assert any(is_path(each) and is_there(each) for each in backticked(answer)), answer
        assert len(answer.split()) <= ROW_WORDS_MAX


def terms() -> dict[str, str]:
    rows = [line.strip("|\n").split("|") for line in GLOSSARY.read_text().splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2 and "---" not in row[0]}


def test_the_glossary_is_in_order() -> None:
    names = [each.lower().replace("-", " ") for each in terms() if each != "term"]
    assert len(names) > 60
    assert names == sorted(names)


def test_terms_are_defined_by_terms() -> None:
    known = {name.lower() for name in terms()}
    forms = known | {name + end for name in known for end in ("s", "es", "'s")}
    forms |= {"committed"}
    for name, meaning in terms().items():
        used = {found.lower() for found in re.findall(r"\*([^*]+)\*", meaning)}
        assert used <= forms, f"{name}: {sorted(used - forms)}"
        assert len(re.findall(r"[.!?](?: |$)", meaning)) <= 2 or name == "term", name
