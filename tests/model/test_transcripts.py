"""The transcripts of tests/data/transcripts: played again, every line is as it was."""

import logging
import re
from pathlib import Path

import pytest

from tests.transcripts import scenes, stories
from tests.transcripts.scenes import SCENES, differing, merged, read_scene, rendered

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "transcripts.md"
BYTES_MAX = 300_000
"""The size of all files together: they are for readers."""
WRITE = "python -m tests.transcripts --write"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "holdfast")


def explained() -> set[str]:
    """The differences that the page has a reason for."""
    return set(re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", scenes.scene_names())
def test_a_scene_is_as_it_was(name: str) -> None:
    scene, text = read_scene(SCENES / f"{name}.txt")
    assert scenes.render(scene) == text, f"see docs/internals/transcripts.md, and `{WRITE} {name}`"


@pytest.mark.parametrize("name", scenes.scene_names())
def test_every_difference_has_a_reason(name: str) -> None:
    scene, text = read_scene(SCENES / f"{name}.txt")
    for kind, differs in enumerate(differing(text)):
        reasons = scene.reasons(kind)
        assert differs == bool(reasons), f"{scenes.DIFFERS[kind]} {reasons}"
        assert explained() >= set(reasons)


def test_every_reason_has_a_difference() -> None:
    named: set[str] = set()
    for name in scenes.scene_names():
        scene, _ = read_scene(SCENES / f"{name}.txt")
        named.update(scene.reasons(0), scene.reasons(1))
    assert named == explained()


@pytest.mark.parametrize("name", stories.story_names())
def test_a_story_is_as_it_was(name: str) -> None:
    story, text = stories.read_story(stories.STORIES / f"{name}.txt")
    assert stories.render(story) == text, f"see docs/internals/transcripts.md, and `{WRITE} {name}`"


def test_every_name_is_one_file() -> None:
    """The command that writes takes names."""
    assert not set(stories.story_names()) & set(scenes.scene_names())


def test_readers_find_every_story() -> None:
    found = re.findall(r"stories/([a-z0-9-]+)\.txt", PAGE.read_text())
    assert sorted(found) == stories.story_names()


def test_the_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in SCENES.parent.rglob("*.txt")) < BYTES_MAX


def test_the_lines_of_a_form_are_its_transcript() -> None:
    """Whatever differs, nothing is lost or moved by the comparison."""
    played = [
        {"a": ["1", "2", "3", "3"], "log, partition 0": ["x"]},
        {"a": ["1", "3", "2", "3"], "b": ["1"]},
    ]
    found = merged(played)
    for mark, sections in zip(scenes.MARKS, played, strict=True):
        for name, lines in found.items():
            of_form = [line for marks, line in lines if mark in marks]
            assert of_form == sections.get(name, [])
    scene = scenes.Scene("x", ["# x"])
    assert differing(rendered(scene, played)) == (True, True)
    assert differing(rendered(scene, [played[0]] * 2)) == (False, False)
    assert differing(rendered(scene, [{"log, partition 0": [each]} for each in "xy"])) == (
        False,
        True,
    )
