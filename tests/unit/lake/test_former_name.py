"""`holdfast.pipeline`, the former name of `holdfast_lake`, in programs and files of tables."""

import importlib

import pytest


def test_the_former_name_is_the_same_package() -> None:
    assert importlib.import_module("holdfast.pipeline") is importlib.import_module("holdfast_lake")


def test_a_module_below_it_is_the_same_module() -> None:
    """A second copy would have other classes, which no `isinstance` knows."""
    module = importlib.import_module("holdfast_lake.tables.rules")
    assert importlib.import_module("holdfast.pipeline.tables.rules") is module
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == "holdfast_lake.tables.rules"


def test_a_module_that_is_not_there_is_missed() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"holdfast_lake\.nothing"):
        importlib.import_module("holdfast.pipeline.nothing")
