"""Stories: each command of a transcript is followed by everything that it causes, in order.

A file has commands and comments at the beginning of a line, and below each command, indented, what
happened: packets (`meter > n1`), frames between nodes (`n1 > n2`), and what a node did. Two lines
tell of the disk: `n1 writes` when a write group begins, and `n1 has on disk` when fdatasync is
done. Heartbeats and Raft messages without news are left out.

Its settings: `form one|three`, those of `commands`, and `hide FRAME ...`. Of a command
behind `quietly` nothing is told. The content of a record is told once, then only its place.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.log.batch import Batch
from holdfast.log.journal.segment import WriteGroup
from holdfast.log.record import Record
from holdfast.node.effects import Note
from tests.sim.host import Host
from tests.sim.network import Item
from tests.transcripts.actors import Peer
from tests.transcripts.commands import SETUP, Director, read_setup
from tests.transcripts.frames import NAMES, Frames, metadata_changes
from tests.transcripts.stage import THREE, Stage

STORIES: Final = Path(__file__).parents[1] / "data" / "transcripts" / "stories"
INDENT: Final = "    "
QUIETLY: Final = "quietly "
"""Before a command of which nothing is told."""
SETTINGS: Final = (*SETUP, "form", "hide")
UNTOLD: Final = frozenset({"connected", "disconnected", "metadata_leader"})
"""Notes about what other lines tell."""


@dataclass
class Story:
    name: str
    script: list[str]
    """The lines that are not indented."""

    def setting(self, name: str, default: str) -> str:
        for line in self.script:
            if line.startswith(f"{name} "):
                return line.removeprefix(f"{name} ")
        return default


def read_story(path: Path) -> tuple[Story, str]:
    """The story, and the file."""
    text = path.read_text()
    script = [line for line in text.splitlines() if not line.startswith(INDENT)]
    return Story(path.stem, script), text


def story_names() -> list[str]:
    return sorted(path.stem for path in STORIES.glob("*.txt"))


def render(story: Story) -> str:
    """The file of a story that is played now."""
    teller = Teller(story)
    lines: list[str] = []
    for line in story.script:
        lines.append(line)
        if line and not line.startswith("#") and line.split()[0] not in SETTINGS:
            told = teller.play(line.removeprefix(QUIETLY))
            if not line.startswith(QUIETLY):
                lines += [INDENT + each for each in told]
    teller.stage.check()
    return "\n".join(lines) + "\n"


class Teller:
    """Plays a story, and listens to everything."""

    def __init__(self, story: Story) -> None:
        self.stage = Stage(story.setting("form", THREE), read_setup(story.script))
        self._hidden = set(story.setting("hide", "").split())
        self._frames = Frames()
        # Who does something, or between whom it passes; and what.
        self._lines: list[tuple[str, str]] = []
        self._watermarks: dict[str, list[int]] = {}
        self._metadata = self.stage.newest_metadata()
        self._director = Director(self.stage, self._packet)
        for host in self.stage.hosts.values():
            self._note_watermarks(host)
            host.mirror.on_begin = lambda group, host=host: self._writes(host, group)
            host.mirror.on_wrote = lambda group, host=host: self._wrote(host, group)
        self.stage.on_turn = self._turn
        self.stage.on_note = self._note
        self.stage.on_push(self._frame)
        self.stage.schedule.on_trace = self._trace

    def play(self, line: str) -> list[str]:
        self._lines = []
        self._director.play(line)
        return [f"{who:<14} {text}" for who, text in _together(self._lines)]

    def _tell(self, who: str, text: str) -> None:
        self._lines.append((who, text))

    def _packet(self, peer: Peer, direction: str, line: str) -> None:
        ends = (peer.name, peer.node) if direction == ">" else (peer.node, peer.name)
        self._tell(" > ".join(ends), line)

    def _trace(self, line: str) -> None:
        _, who, text = line.split(maxsplit=2)
        if who in self.stage.hosts and text.startswith(("starts", "connected to", "lost ")):
            self._tell(who, text)
        elif text == "is killed":
            # In good order, too.
            self._tell(who, "ends")

    def _frame(self, sender: str, receiver: str, item: Item) -> None:
        self._note_watermarks(self.stage.hosts[sender])
        if isinstance(item, str):
            return
        kind, data = item
        line = self._frames.line(sender, receiver, kind, data)
        if line is not None and NAMES[kind] not in self._hidden:
            self._tell(f"{sender} > {receiver}", line)

    def _writes(self, host: Host, group: WriteGroup) -> None:
        self._note_watermarks(host)
        self._tell(host.name, f"writes {self._frames.records(_records(group))}")

    def _wrote(self, host: Host, group: WriteGroup) -> None:
        ends: dict[int, int] = {}
        for record in _records(group):
            ends[record.partition] = record.offset
        text = " ".join(f"{partition}:{offset}" for partition, offset in sorted(ends.items()))
        self._tell(host.name, f"has on disk up to {text}")

    def _turn(self, host: Host) -> None:
        self._note_watermarks(host)
        now = self.stage.newest_metadata()
        if now is not None and now is not self._metadata:
            for line in metadata_changes(self._metadata, now):
                self._tell("metadata", line)
            self._metadata = now

    def _note_watermarks(self, host: Host) -> None:
        if host.process is None:
            return
        now = host.process.journal.high_watermark
        before = self._watermarks.get(host.name)
        if before is not None:
            moved = [
                f"{partition}:{offset}"
                for partition, offset in enumerate(now)
                if offset > before[partition]
            ]
            if moved:
                self._tell(host.name, f"commits below {' '.join(moved)}")
        self._watermarks[host.name] = list(now)

    def _note(self, host: Host, note: Note) -> None:
        if note.event not in UNTOLD:
            fields = " ".join(
                f"{name}={value}"
                for name, value in note.fields.items()
                if value and name != "remote"
            )
            self._tell(host.name, f"logs {note.event} {fields}")


def _records(group: WriteGroup) -> list[Record]:
    return [record for data in group.data for record in Batch(data).records()]


def _together(lines: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same frame to several nodes, one after the other, is one line. Their order is that of a
    set, and another one in each process."""
    found: list[tuple[str, str]] = []
    for who, text in lines:
        before, told = found[-1] if found else ("", "")
        sender, _, receivers = before.partition(" > ")
        receiver = who.removeprefix(f"{sender} > ")
        if told == text and receivers and receiver != who:
            all_of_them = ",".join(sorted([*receivers.split(","), receiver]))
            found[-1] = (f"{sender} > {all_of_them}", text)
        else:
            found.append((who, text))
    return found
