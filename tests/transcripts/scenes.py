"""Scenes: one transcript of the two forms, side by side.

A file begins with what it shows and its commands. Then it has a section for each connection, with
the packets in the order in which the client sent (`>`) and received (`<`) them, and one for each
partition of the log. A line that both forms have begins with blanks. The others begin with the form
that has it: `1` a cluster of one, `3` a cluster of three. So the lines that begin with blanks or a
`1` are the transcript of a cluster of one.
"""

from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from tests.transcripts.actors import Peer
from tests.transcripts.commands import Director, read_setup
from tests.transcripts.records import RecordLines
from tests.transcripts.stage import BEGIN_S, FORMS, Stage

SCENES: Final = Path(__file__).parents[1] / "data" / "transcripts" / "scenes"
MARKS: Final = "13"
DIFFERS: Final = ("# clients differ:", "# log differs:")
"""The lines that name the reasons, in the order of the sections."""

Sections = dict[str, list[str]]
Line = tuple[str, str]
"""The marks of the forms that have a line, and the line."""


@dataclass
class Scene:
    name: str
    script: list[str]
    """Comments and commands."""

    @property
    def commands(self) -> list[str]:
        return [line for line in self.script if line and not line.startswith("#")]

    def reasons(self, kind: int) -> list[str]:
        """Why clients (0) or the log (1) differ, as the file says."""
        for line in self.script:
            if line.startswith(DIFFERS[kind]):
                return [each.strip() for each in line.removeprefix(DIFFERS[kind]).split(",")]
        return []


def read_scene(path: Path) -> tuple[Scene, str]:
    """The scene, and the file."""
    text = path.read_text()
    script, _, _ = text.partition("\n== ")
    return Scene(path.stem, script.rstrip().splitlines()), text


def scene_names() -> list[str]:
    return sorted(path.stem for path in SCENES.glob("*.txt"))


def play(scene: Scene, form: str) -> Sections:
    """The sections of one form."""
    stage = Stage(form, read_setup(scene.script))
    sections: Sections = {}

    def told(peer: Peer, direction: str, line: str) -> None:
        seconds = int((stage.schedule.now - BEGIN_S + 1e-3) * 10) / 10
        sections.setdefault(peer.name, []).append(f"{seconds:5.1f} {direction} {line}")

    director = Director(stage, told)
    for line in scene.commands:
        director.play(line)
    log = stage.log()
    lines = RecordLines(stage.begin_us, log)
    for partition in range(len(log)):
        found = lines.lines(partition)
        if found:
            sections[f"log, partition {partition}"] = found
    stage.check()
    return sections


def render(scene: Scene) -> str:
    """The file of a scene that is played now."""
    return rendered(scene, [play(scene, form) for form in FORMS])


def rendered(scene: Scene, played: list[Sections]) -> str:
    parts = ["\n".join(scene.script)]
    for name, lines in merged(played).items():
        text = "\n".join(f"{_margin(marks)} {line}".rstrip() for marks, line in lines)
        parts.append(f"== {name}\n{text}")
    return "\n\n".join(parts) + "\n"


def _margin(marks: str) -> str:
    if marks == MARKS:
        return " " * len(MARKS)
    return "".join(mark if mark in marks else " " for mark in MARKS)


def merged(played: list[Sections]) -> dict[str, list[Line]]:
    """The sections of all forms, their lines with the marks of the forms."""
    names: dict[str, None] = {}
    for sections in played:
        names.update(dict.fromkeys(sections))
    ordered = sorted(names, key=lambda name: (name.startswith("log"), list(names).index(name)))
    found = {}
    for name in ordered:
        lines: list[Line] = []
        for mark, sections in zip(MARKS, played, strict=True):
            lines = _merge(lines, mark, sections.get(name, []))
        found[name] = lines
    return found


def _merge(lines: list[Line], mark: str, more: list[str]) -> list[Line]:
    """The lines with those of one more form."""
    found: list[Line] = []
    matcher = SequenceMatcher(None, [line for _, line in lines], more, autojunk=False)
    for kind, begin, end, more_begin, more_end in matcher.get_opcodes():
        if kind == "equal":
            found += [(marks + mark, line) for marks, line in lines[begin:end]]
        else:
            found += lines[begin:end]
            found += [(mark, line) for line in more[more_begin:more_end]]
    return found


def differing(text: str) -> tuple[bool, bool]:
    """Whether forms differ in a section of a client, and in one of the log."""
    clients = log = False
    is_log = False
    for line in ("== " + text.partition("\n== ")[2]).splitlines():
        if line.startswith("== "):
            is_log = line.startswith("== log")
        elif line[: len(MARKS)].strip():
            log, clients = log or is_log, clients or not is_log
    return clients, log
