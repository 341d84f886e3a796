"""Layouts that mypyc gets wrong, and cycles that it makes, without a word."""

import ast
import builtins
import importlib
from pathlib import Path

import pytest

from tests.support.source_tree import place

OBJECT_BYTES = 24
"""The size of a compiled object without attributes: its head and the pointer to its methods."""


ROOT = Path(__file__).parents[2]


def hot_modules() -> list[str]:
    tree = ast.parse((ROOT / "setup.py").read_text())
    found: list[str] = next(
        ast.literal_eval(each.value)
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "HOT"
    )
    return found


def test_no_compiled_module_has_a_struct() -> None:
    """The compiled class checks the default of an attribute against its type, and a default made by
    `msgspec.field` is of none: the module cannot be imported."""
    found = [
        f"{name}:{each.name}"
        for name in hot_modules()
        for each in ast.walk(ast.parse(place(name).read_text()))
        if isinstance(each, ast.ClassDef) and any(ast.unparse(b) == "Struct" for b in each.bases)
    ]
    assert not found, "put them into a module that is not compiled"


BUILTINS_DERIVED = frozenset(
    {"Exception", "BaseException", "LookupError", "IndexError", "ValueError", "Warning",
     "UserWarning", "dict", "object"}
)  # fmt: skip
"""The built-in types from which mypyc lets a compiled class derive."""


def test_no_compiled_module_derives_from_another_built_in_type() -> None:
    """mypyc refuses the module, and nothing is compiled any more."""
    found = [
        f"{name}:{each.name}"
        for name in hot_modules()
        for each in ast.walk(ast.parse(place(name).read_text()))
        if isinstance(each, ast.ClassDef)
        and any(
            hasattr(builtins, base) and base not in BUILTINS_DERIVED
            for base in map(ast.unparse, each.bases)
        )
    ]
    assert not found, f"derive from one of {sorted(BUILTINS_DERIVED)}"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def nested_names(outer: Function) -> tuple[set[str], set[str]]:
    """The variables of a function that refer to functions directly in it, also by what a call with
    such a function returns, and all names that these functions use."""
    nested: list[ast.AST] = []
    inside = list(ast.iter_child_nodes(outer))
    for each in inside:
        if isinstance(each, Function | ast.Lambda):
            nested.append(each)
        elif not isinstance(each, ast.ClassDef):
            inside.extend(ast.iter_child_nodes(each))
    names = {each.name for each in nested if isinstance(each, Function)}
    used = {each.id for one in nested for each in ast.walk(one) if isinstance(each, ast.Name)}
    for each in inside:
        if isinstance(each, ast.Assign):
            parts = list(ast.walk(each.value))
            if names & {part.id for part in parts if isinstance(part, ast.Name)} or any(
                isinstance(part, ast.Lambda) for part in parts
            ):
                names |= {one.id for one in each.targets if isinstance(one, ast.Name)}
    return names, used


def kept_functions(source: str) -> list[str]:
    """The functions of a module that have nested ones in a cycle when they are compiled."""
    return [
        outer.name
        for outer in ast.walk(ast.parse(source))
        if isinstance(outer, Function)
        for names, used in [nested_names(outer)]
        if names & used
    ]


@pytest.mark.parametrize(
    ("source", "is_kept"),
    [
        ("def f():\n def g(): pass\n return g", False),
        ("def f():\n def g(): return g\n return g", True),
        ("def f():\n def g(): pass\n return lambda: g()", True),
        ("def f():\n if True:\n  def g(): return h\n def h(): pass\n return g", True),
        ("def f():\n x = h(lambda: 1)\n return lambda: x", True),
        ("def f():\n x = h()\n return lambda: x", False),
    ],
)
def test_a_function_in_a_cycle_is_found(source: str, is_kept: bool) -> None:
    assert kept_functions(source) == ["f"] * is_kept


def test_no_compiled_function_is_in_a_cycle() -> None:
    """Nested functions refer to one object with the variables of the outer function. It refers to
    them if one of them names another, or what was made with another. All that such a variable
    refers to then waits for a garbage collection, and the collector of a broker leaves old objects
    alone: each read of the log kept the session that it was for, with its messages."""
    found = {name: kept_functions(place(name).read_text()) for name in hot_modules()}
    assert not {name: kept for name, kept in found.items() if kept}, "use functools.partial"


def compiled_classes() -> list[type]:
    hot = hot_modules()
    paths = [place(name).relative_to(ROOT / "src").with_suffix("") for name in hot]
    modules = [importlib.import_module(".".join(path.parts)) for path in paths]
    return [
        value
        for module in modules
        if str(module.__file__).endswith(".so")
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def test_no_class_becomes_callable_below_the_first_attribute() -> None:
    """An object with `__call__` has one more pointer in front of its attributes. Methods of a base
    without `__call__` then read each attribute from the place of the one before it."""
    found = compiled_classes()
    if not found:
        pytest.skip("the compiled form has layouts")
    natives = set(found)
    callables = [each for each in found if "__call__" in each.__dict__]
    assert any(each.__name__ == "ConnectionDriver" for each in callables)
    for each in callables:
        for base in each.__mro__[1:]:
            if base in natives and "__call__" not in dir(base):
                assert base.__basicsize__ <= OBJECT_BYTES, (each, base)
