"""Reads the committed messages of a data directory that no broker serves."""

from pathlib import Path

from holdfast.cli.log.records import ReplicaJournal
from holdfast.log.files.data_directory import open_to_read
from holdfast.log.reading.segment_reader import Damage
from holdfast.log.record import MESSAGE, Record
from holdfast.protocol.topics.names import matches


def stored_messages(directory: Path, filter: str = "#") -> list[Record]:
    """The messages of a replica's directory under a filter, in the order of each partition."""

    def refuse(damage: Damage) -> None:
        raise AssertionError(damage)

    records = ReplicaJournal(open_to_read(directory), refuse).records()
    return [
        each for each in records if each.kind == MESSAGE and matches(filter, each.topic.decode())
    ]
