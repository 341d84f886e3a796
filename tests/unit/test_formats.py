"""Formats are promises: this version writes what is recorded, and reads what earlier ones wrote."""

import pytest

from tests.support.format_samples import FOLDER, recorded
from tests.support.wire_samples import (
    CLUSTER,
    FEDERATION,
    all_samples,
    cluster_kinds,
    federation,
)
from tools.formats import differences

SAMPLES = {(each.format, each.name): each for each in all_samples()}


def test_what_is_written_is_what_is_recorded() -> None:
    assert not differences(), "see docs/internals/formats.md"


def lines() -> list[tuple[str, str, str]]:
    """(format, number, name) of each recorded line of every number."""
    files = [file.stem.rpartition("-") for file in sorted(FOLDER.glob("*.txt"))]
    return [
        (format, number, name)
        for format, _, number in files
        for name in recorded(format, int(number))
    ]


@pytest.mark.parametrize(("format", "number", "name"), lines())
def test_what_is_recorded_is_read(format: str, number: str, name: str) -> None:
    sample = SAMPLES[format, name]
    assert sample.decode(recorded(format, int(number))[name]) == sample.value


def test_every_frame_has_an_example() -> None:
    assert {name.partition(".")[0] for format, name in SAMPLES if format == CLUSTER} == {
        "handshake", *cluster_kinds(),
    }  # fmt: skip
    members = {name for format, name in SAMPLES if format == FEDERATION and "FRAME" in name}
    assert members == {f"FRAME.{kind.__name__}" for kind in federation.KINDS.values()}
