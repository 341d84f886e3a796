"""A ReplicaLog in memory over a simulated disk: an append-only journal of batches, of which a crash
leaves what was synced and perhaps a little more."""

from dataclasses import dataclass
from random import Random

from holdfast.log.batch import Batch
from holdfast.log.batch_builder import BatchBuilder
from holdfast.log.record import MESSAGE, Record
from tests.sim.schedule import Wrong


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Wrong(text)


@dataclass(slots=True)
class Entry:
    """Of the journal: a batch, or (data empty) a reset of the partition to `base`."""

    partition: int
    base: int
    end: int
    epoch: int
    data: bytes
    numbers: tuple[int, ...]
    position: int = 0


def entry_of(batch: Batch) -> Entry:
    data = batch.data[batch.start : batch.start + batch.length]
    numbers = tuple(int(record.payload) for record in batch.records())
    return Entry(batch.partition, batch.base_offset, batch.end_offset, batch.epoch, data, numbers)


class ReplicaDisk:
    """What outlives a process: entries as they were written, in order."""

    def __init__(self, partitions: int) -> None:
        self.entries: list[Entry] = []
        self.synced = 0
        self.start_offsets = [0] * partitions
        self.watermarks = [0] * partitions
        # The offsets at which a log on it was cut.
        self.cuts: list[int] = []

    def write(self, entry: Entry) -> None:
        entry.position = len(self.entries)
        self.entries.append(entry)

    def crash(self, random: Random) -> None:
        """Of what was not synced a prefix may have reached the platter."""
        kept = self.synced + random.randint(0, len(self.entries) - self.synced)
        del self.entries[random.choice((self.synced, kept)) :]
        self.synced = len(self.entries)

    def contents(self, partition: int, count: int) -> list[Entry]:
        """The partition's batches by the first `count` entries; later ones override."""
        found: list[Entry] = []
        for entry in self.entries[:count]:
            if entry.partition == partition:
                if not entry.data:
                    found.clear()
                    continue
                while found and found[-1].base >= entry.base:
                    found.pop()
                found.append(entry)
        return [entry for entry in found if entry.end > self.start_offsets[partition]]


class SimReplicaLog:
    def __init__(self, disk: ReplicaDisk) -> None:
        partitions = len(disk.start_offsets)
        self.disk = disk
        self.start_offsets = list(disk.start_offsets)
        self.batches = [disk.contents(number, len(disk.entries)) for number in range(partitions)]
        self.next_offset = [
            batches[-1].end if batches else start
            for batches, start in zip(self.batches, self.start_offsets, strict=True)
        ]
        self.durable_offset = list(self.next_offset)
        self.high_watermark = list(map(max, disk.watermarks, disk.start_offsets))
        self._epochs = [0] * partitions
        self._open: dict[int, BatchBuilder] = {}

    def append(self, partition: int, number: int) -> None:
        builder = self._open.get(partition)
        if builder is None:
            builder = BatchBuilder(partition, self.next_offset[partition])
            self._open[partition] = builder
        payload = b"%d" % number
        builder.add(
            Record(builder.partition, MESSAGE, timestamp_us=number, topic=b"t", payload=payload)
        )
        self.next_offset[partition] += 1

    def take(self) -> list[tuple[int, int, int, bytes]]:
        built = []
        for partition, builder in self._open.items():
            data = builder.build(self._epochs[partition])
            entry = entry_of(Batch(data))
            self._add(entry)
            built.append((partition, entry.base, entry.end, data))
        self._open.clear()
        return built

    def _add(self, entry: Entry) -> None:
        self.batches[entry.partition].append(entry)
        self.disk.write(entry)

    def lead(self, partition: int, epoch: int) -> None:
        require(partition not in self._open, "what an older epoch appended is still open")
        require(epoch > self.last_epoch(partition), f"epoch {epoch} is led a second time")
        self._epochs[partition] = epoch

    def append_batch(self, batch: Batch) -> None:
        entry = entry_of(batch)
        require(entry.base == self.next_offset[entry.partition], "a batch leaves a hole")
        require(entry.epoch >= self.last_epoch(entry.partition), "epochs fall")
        self._add(entry)
        self.next_offset[entry.partition] = entry.end

    def truncate(self, partition: int, offset: int) -> None:
        require(self.high_watermark[partition] <= offset, "what is committed is cut")
        self.disk.cuts.append(offset)
        require(offset <= self.next_offset[partition], "a cut beyond the end")
        self._open.pop(partition, None)
        batches = self.batches[partition]
        while batches and batches[-1].base >= offset:
            batches.pop()
        end = batches[-1].end if batches else self.start_offsets[partition]
        require(end == offset, f"{offset} is no batch boundary, {end} is")
        self.next_offset[partition] = offset
        self.durable_offset[partition] = min(self.durable_offset[partition], offset)

    def reset(self, partition: int, offset: int) -> None:
        require(self.high_watermark[partition] <= offset, "what is committed is given up")
        self._open.pop(partition, None)
        self.batches[partition].clear()
        self.disk.write(Entry(partition, offset, offset, 0, b"", ()))
        for offsets in (self.start_offsets, self.disk.start_offsets, self.next_offset):
            offsets[partition] = offset
        self.durable_offset[partition] = offset
        self.high_watermark[partition] = offset
        self.synced(len(self.disk.entries))

    def advance(self, partition: int, offset: int) -> None:
        require(self.high_watermark[partition] < offset, "the watermark falls")
        require(offset <= self.durable_offset[partition], "the watermark is above the durable end")
        self.high_watermark[partition] = offset

    def last_epoch(self, partition: int) -> int:
        batches = self.batches[partition]
        return batches[-1].epoch if batches else 0

    def epoch_end(self, partition: int, epoch: int) -> tuple[int, int]:
        for entry in reversed(self.batches[partition]):
            if entry.epoch <= epoch:
                return entry.epoch, entry.end
        return 0, self.start_offsets[partition]

    def synced(self, count: int) -> None:
        """The first `count` entries of the journal are durable."""
        disk = self.disk
        disk.synced = max(disk.synced, count)
        for partition, batches in enumerate(self.batches):
            durable = self.start_offsets[partition]
            for entry in batches:
                if entry.position >= disk.synced:
                    break
                durable = entry.end
            self.durable_offset[partition] = durable

    def checkpoint(self) -> None:
        self.disk.watermarks = list(self.high_watermark)

    def retain(self, partition: int, offset: int) -> None:
        """Give up whole batches below `offset`, never the last."""
        batches = self.batches[partition]
        while len(batches) > 1 and batches[0].end <= min(offset, self.high_watermark[partition]):
            gone = batches.pop(0)
            self.start_offsets[partition] = gone.end
            self.disk.start_offsets[partition] = gone.end

    def read(self, partition: int, start: int, bytes_max: int) -> list[bytes]:
        """What is durable; what was appended later is not in the file yet."""
        found: list[bytes] = []
        size = 0
        for entry in self.batches[partition]:
            if start <= entry.base and entry.end <= self.durable_offset[partition]:
                if (not found and entry.base != start) or size >= bytes_max:
                    break
                found.append(entry.data)
                size += len(entry.data)
        return found

    def numbers(self, partition: int) -> dict[int, int]:
        """What lies at each offset, of what was closed."""
        return {
            entry.base + index: number
            for entry in self.batches[partition]
            for index, number in enumerate(entry.numbers)
        }
