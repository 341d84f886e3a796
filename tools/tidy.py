"""`make tidy`: the limits on size and naming that ruff does not check.

`tidy.toml` beside this file lists what exceeds a limit, each with its value and the reason why it
may stay; a table may give one reason for all of its entries. The check fails for anything that is
not in the list, has grown, or has no reason. It fails as well when an entry has become better or
has gone, so the list only shrinks: `--write` takes over what is better, and refuses to add or raise
an entry.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"
BESIDE = ("holdfast_federation", "holdfast_lab", "holdfast_lake")
EXCEPTIONS = Path(__file__).with_name("tidy.toml")

LIMITS = {
    "function_lines": 60,
    "positional_parameters": 7,
    "public_methods": 20,
    "module_lines": 700,
    "package_lines": 0,
    "packages": 12,
    "class_name_in_folder": 1,
    "class_name": 1,
    "gerund": 0,
    "noun_for_verb": 0,
    "imperative": 0,
    "untyped_dictionaries": 0,
    "code_share": 82,
    "long_lines": 0,
    "missing_docstrings": 0,
}
"""Rule -> the highest value that needs no entry in the list. `package_lines` is in hundreds of
lines, so that only a commit that matters changes it: the list is the budget of each package."""

COLUMNS = 100
PURE = ("protocol", "log", "node", "holdfast_federation/core")
"""Packages whose comments and docstrings are at least 18 % of their lines."""
DOCUMENTED = ("client", "holdfast_lab", "holdfast_lake")
"""Packages where every public function has a docstring."""
NOUNS = {
    "finding", "flooding", "folding", "forwarding", "framing", "heading", "incoming", "logging",
    "matching", "outgoing", "planning", "ring", "routing", "setting", "signing", "sorting",
    "string", "tailing", "testing", "timing",
}  # fmt: skip
"""Words that end in -ing and are nouns of the field."""
NOUN_FOR_VERB = re.compile(r"The [\w' -]+ of ")
"""The beginning of a module's docstring that names an action: "The run of", in place of "Runs"."""
IMPERATIVE = re.compile(r"(Add|Close|Make|Note|Raise|Remove|Return|Send|Wait|Write)\b")
"""The beginning of a function's docstring in the other mood: "Return", in place of "Returns"."""
UNTYPED = re.compile(r"\b(dict|Mapping|MutableMapping)\[str, (object|Any)\]")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Values = dict[str, dict[str, int]]
"""Rule -> name of the place -> its value."""
Reasons = dict[str, dict[str, str]]
"""Rule -> name of the place, or "" for the whole rule -> why it may exceed the limit."""


def body_lines(function: Function) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body and function.end_lineno else 0


def positional(function: Function, in_class: bool) -> int:
    """How many arguments a call may give by place, the object itself not counted."""
    count = len(function.args.posonlyargs) + len(function.args.args)
    static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
    return count - (1 if in_class and not static and count else 0)


def functions(tree: ast.Module) -> Iterator[tuple[str, Function, bool]]:
    """(qualified name, function, whether a method), nested ones too."""
    stack: list[tuple[str, ast.AST, bool]] = [("", tree, False)]
    while stack:
        prefix, parent, in_class = stack.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Function):
                yield prefix + node.name, node, in_class
                stack.append((f"{prefix}{node.name}.", node, False))
            elif isinstance(node, ast.ClassDef):
                stack.append((f"{prefix}{node.name}.", node, True))
            else:
                stack.append((prefix, node, in_class))


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def prose_lines(text: str, tree: ast.Module) -> int:
    """Lines of comments and of docstrings, those of constants too."""
    lines = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno:
            lines.update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def is_gerund(name: str) -> bool:
    """Whether the last word of a module's or class' name ends in -ing and is no noun."""
    words = re.findall(r"[A-Z]?[a-z]+", name)
    return bool(words) and words[-1].lower().endswith("ing") and words[-1].lower() not in NOUNS


def long_lines(document: Path) -> int:
    """Lines of prose above the limit: not tables, code blocks, or a lone long link."""
    count, in_code = 0, False
    for line in document.read_text().splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and len(line) > COLUMNS and " " in line.strip()[:COLUMNS]:
            count += not line.lstrip().startswith("|")
    return count


def values() -> Values:
    """What the tree has above the limits."""
    found: Values = {rule: {} for rule in LIMITS}
    classes: dict[str, list[str]] = defaultdict(list)
    prose: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    package_lines: Counter[str] = Counter()
    roots = [SOURCE, *(SOURCE.parent / name for name in BESIDE)]
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        base = SOURCE if path.is_relative_to(SOURCE) else SOURCE.parent
        name = path.relative_to(base).as_posix()
        text = path.read_text()
        tree = ast.parse(text)
        found["module_lines"][name] = text.count("\n")
        package_lines[name.split("/")[0]] += text.count("\n")
        summary = " ".join((ast.get_docstring(tree) or "").split())
        found["noun_for_verb"][name] = int(NOUN_FOR_VERB.match(summary) is not None)
        if is_public(path.stem) and is_gerund(path.stem):
            found["gerund"][name] = 1
        for qualified, function, in_class in functions(tree):
            place = f"{name}:{qualified}"
            found["function_lines"][place] = body_lines(function)
            summary = ast.get_docstring(function) or ""
            found["imperative"][place] = int(IMPERATIVE.match(summary) is not None)
            found["positional_parameters"][place] = positional(function, in_class)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
                methods = [each.name for each in node.body if isinstance(each, Function)]
                # `check` raises for a broken invariant, so it is no part of the interface.
                public = sum(is_public(each) and each != "check" for each in methods)
                found["public_methods"][f"{name}:{node.name}"] = public
                if is_public(node.name) and is_gerund(node.name):
                    found["gerund"][f"{name}:{node.name}"] = 1
        signatures = [
            ast.unparse(each)
            for qualified, function, _ in functions(tree)
            if is_public(qualified)
            for each in (*function.args.args, *function.args.kwonlyargs, function.returns)
            if each is not None
        ]
        found["untyped_dictionaries"][name] = sum(bool(UNTYPED.search(e)) for e in signatures)
        package = next((each for each in PURE if name.startswith(each + "/")), None)
        if package is not None:
            prose[package] += prose_lines(text, tree)
            lines[package] += text.count("\n")
        if name.split("/")[0] in DOCUMENTED and "/cli/" not in name:
            found["missing_docstrings"][name] = sum(
                ast.get_docstring(function) is None
                for qualified, function, _ in functions(tree)
                if is_public(qualified)
            )
    found["package_lines"] = {
        package: -(-count // 100) for package, count in package_lines.items() if "." not in package
    }
    for package, count in lines.items():
        found["code_share"][package] = 100 - int(100 * prose[package] / count)
    for name, places in classes.items():
        if is_public(name):
            found["class_name"][name] = len(places)
            for folder, count in Counter(each.rpartition("/")[0] for each in places).items():
                found["class_name_in_folder"][f"{folder}:{name}"] = count
    found["packages"]["src/holdfast"] = sum(
        (path / "__init__.py").exists() for path in SOURCE.iterdir()
    )
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        found["long_lines"][document.relative_to(ROOT).as_posix()] = long_lines(document)
    return {
        rule: {place: value for place, value in each.items() if value > LIMITS[rule]}
        for rule, each in found.items()
    }


def parse(text: str) -> tuple[Values, Reasons]:
    """The values of the list, and their reasons."""
    listed: Values = {}
    reasons: Reasons = {}
    for rule, entries in tomllib.loads(text).items():
        listed[rule], reasons[rule] = {}, {}
        for place, entry in entries.items():
            if place == "reason":
                reasons[rule][""] = entry
            elif isinstance(entry, int):
                listed[rule][place] = entry
            else:
                listed[rule][place] = entry["value"]
                reasons[rule][place] = entry["reason"]
    return listed, reasons


def render(exceptions: Values, reasons: Reasons) -> str:
    """The list as TOML."""
    parts = ["# What exceeds a limit of tidy.py, and why. It may only shrink: see `make tidy`.\n"]
    for rule, places in exceptions.items():
        if not places:
            continue
        known = reasons.get(rule, {})
        parts.append(f"\n[{rule}]\n")
        if "" in known:
            parts.append(f"reason = {json.dumps(known[''])}\n")
        for place, value in sorted(places.items()):
            reason = known.get(place)
            entry = f"{{ value = {value}, reason = {json.dumps(reason)} }}" if reason else value
            parts.append(f'"{place}" = {entry}\n')
    return "".join(parts)


def unexplained(listed: Values, reasons: Reasons) -> list[str]:
    """The entries without a reason."""
    return [
        f"{place}: {rule} has no reason in tidy.toml"
        for rule, places in listed.items()
        for place in places
        if not reasons[rule].get(place) and not reasons[rule].get("")
    ]


def compare(now: Values, listed: Values) -> tuple[list[str], list[str]]:
    """(what is worse than the list says, what is better)."""
    worse, better = [], []
    for rule, limit in LIMITS.items():
        old, new = listed.get(rule, {}), now[rule]
        for place in sorted(old.keys() | new.keys()):
            before, after = old.get(place, limit), new.get(place, limit)
            if after > before:
                worse.append(f"{place}: {rule} is {after}, at most {before} may be")
            elif after < before:
                better.append(f"{place}: {rule} is {after} now, the list says {before}")
    return worse, better


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="take over what has become better")
    options = parser.parse_args(arguments)
    now = values()
    listed, reasons = parse(EXCEPTIONS.read_text())
    worse, better = compare(now, listed)
    worse += unexplained(listed, reasons)
    if options.write and not worse:
        EXCEPTIONS.write_text(render(now, reasons))
        better = []
    for line in worse + better:
        print(line)
    if better and not worse:
        print("better than the list: `python tools/tidy.py --write` takes it over")
    return 1 if worse or better else 0


if __name__ == "__main__":
    sys.exit(main())
