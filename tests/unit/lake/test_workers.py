"""What a Python process of Spark does once, before its first task."""

import gc

import pytest

from holdfast_lake import workers


def test_objects_of_before_are_collected_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_is_done", False)
    before = gc.get_freeze_count()
    try:
        workers.exclude_modules_from_collection()
        frozen = gc.get_freeze_count()
        assert frozen > before
        garbage = [[None] for _ in range(1000)]
        workers.exclude_modules_from_collection()
        assert gc.get_freeze_count() <= frozen
        assert gc.is_tracked(garbage)
    finally:
        gc.unfreeze()
