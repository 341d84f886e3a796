"""Layouts that mypyc gets wrong without a word."""

import ast
import importlib
from pathlib import Path

import pytest

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
        for each in ast.walk(ast.parse((ROOT / "src" / "holdfast" / name).read_text()))
        if isinstance(each, ast.ClassDef) and any(ast.unparse(b) == "Struct" for b in each.bases)
    ]
    assert not found, "put them into a module that is not compiled"


def compiled_classes() -> list[type]:
    hot = hot_modules()
    names = [f"holdfast.{path.removesuffix('.py').replace('/', '.')}" for path in hot]
    modules = [importlib.import_module(name) for name in names]
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
