"""Layouts that mypyc gets wrong without a word."""

import ast
import importlib
from pathlib import Path

import pytest

OBJECT_BYTES = 24
"""The size of a compiled object without attributes: its head and the pointer to its methods."""


def compiled_classes() -> list[type]:
    tree = ast.parse((Path(__file__).parents[2] / "setup.py").read_text())
    hot = next(
        ast.literal_eval(each.value)
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "HOT"
    )
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
