"""What a node's journal has on its disk, batch by batch, and how much of it was checked."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.io.disk.storage import Storage
from holdfast.log.batch import ATTRIBUTE_RESET, Batch
from holdfast.log.journal.segment import WriteGroup

if TYPE_CHECKING:
    from tests.sim.checks import Checks

READ_BYTES = 64 << 20


class Mirror:
    def __init__(self, checks: "Checks", name: str, partitions: int) -> None:
        self.name = name
        self.partitions = partitions
        self._checks = checks
        self.batches: list[list[Batch]] = []
        # Per partition: how many batches were compared with the committed log.
        self.checked: list[int] = []
        # Called with a write group that the disk begins with, and with one that it has.
        self.on_begin: Callable[[WriteGroup], None] = lambda group: None
        self.on_wrote: Callable[[WriteGroup], None] = lambda group: None
        self.clear()

    def clear(self) -> None:
        self.batches = [[] for _ in range(self.partitions)]
        self.checked = [0] * self.partitions

    def wrote(self, group: WriteGroup) -> None:
        self.on_wrote(group)
        for data in group.data:
            batch = Batch(data)
            if batch.attributes & ATTRIBUTE_RESET:
                self.batches[batch.partition].clear()
                self.checked[batch.partition] = 0
                continue
            self._checks.batch_written(self.name, batch)
            self._add(batch)

    def begin(self, offsets: list[int]) -> None:
        """The journal begins there now; what lies before is gone, or void."""
        for partition, start in enumerate(offsets):
            batches = self.batches[partition]
            while batches and batches[0].end_offset <= start:
                del batches[0]
                self.checked[partition] = max(0, self.checked[partition] - 1)

    def _add(self, batch: Batch) -> None:
        batches = self.batches[batch.partition]
        while batches and batches[-1].end_offset > batch.base_offset:
            batches.pop()
        if len(batches) < self.checked[batch.partition]:
            self._checks.fail(
                f"{self.name} has overwritten what is committed in partition {batch.partition}:"
                f" offset {batch.base_offset}"
            )
        batches.append(batch)

    def reload(self, storage: Storage, *, is_damaged: bool) -> None:
        """After a start, from the disk. The process does not hear of damage by that."""
        self.clear()
        on_damage, storage.opened.store.on_damage = storage.opened.store.on_damage, None
        journal = storage.journal
        # A single broker has appended records by now.
        for partition, end in enumerate(journal.written):
            start = journal.start_offsets[partition]
            while start < end:
                found = storage.reader.read_batches(partition, start, end, READ_BYTES)
                if not found and is_damaged:
                    break
                if not found:
                    self._checks.fail(
                        f"{self.name} cannot read offset {start} of partition {partition},"
                        f" which ends at {end}"
                    )
                for data in found:
                    batch = Batch(data)
                    self.batches[partition].append(batch)
                    start = batch.end_offset
        storage.opened.store.on_damage = on_damage

    def end(self, partition: int) -> int:
        batches = self.batches[partition]
        return batches[-1].end_offset if batches else 0
