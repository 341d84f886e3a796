"""A short run of the fuzzer of each door; `make fuzz` has long ones."""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import DOORS, fuzz


@pytest.mark.parametrize("name", DOORS)
def test_a_door(name: str, tmp_path: Path) -> None:
    assert fuzz(DOORS[name](), 2.0, 7, tmp_path)
