"""Answers other nodes that read the log here: see `whole_log`."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from holdfast.api.endpoints import ApiRefusal
from holdfast.api.nodes.fan_out import Everywhere
from holdfast.api.nodes.own_node import OwnNode
from holdfast.api.nodes.whole_log import (
    REMOTE_BYTES,
    Batches,
    BatchesQuestion,
    Bounds,
    BoundsQuestion,
    HistoryAnswer,
    HistoryQuestion,
    OffsetAnswer,
    TimeQuestion,
    check_restarts,
    oldest_us,
    search,
)
from holdfast.io.event_loop.broker import Broker

T = TypeVar("T")


class LogAnswers:
    """The log of this node, as far as it is stored here."""

    def __init__(self, node: OwnNode, everywhere: Everywhere) -> None:
        self._node = node
        node.ask = everywhere.ask
        everywhere.offer("log_bounds", BoundsQuestion, self._bounds)
        everywhere.offer("log_batches", BatchesQuestion, self._batches)
        everywhere.offer("log_time", TimeQuestion, self._time)
        everywhere.offer("log_history", HistoryQuestion, self._history)

    def _broker(self, partition: int) -> Broker:
        """The broker. Raises `ApiRefusal` (503) if it does not store the partition."""
        broker = self._node.readable_broker
        if not self._is_stored(broker, partition):
            raise ApiRefusal(503, f"partition {partition} is not stored here")
        return broker

    def _is_stored(self, broker: Broker, partition: int) -> bool:
        count = broker.node.state.config.partitions
        return partition < count and broker.runtime.cluster_node.remote_reads.is_stored(partition)

    async def _bounds(self, question: BoundsQuestion) -> Bounds:
        """The bounds, with the end -1 for a partition that is not stored here."""
        broker, ends = self._node.readable_broker, self._node.committed()
        found = Bounds([], [], oldest_us(broker))
        for partition in question.partitions:
            has = self._is_stored(broker, partition)
            found.first.append(broker.reader.first_offset(partition) if has else 0)
            found.ends.append(ends[partition] if has else -1)
        return found

    async def _batches(self, question: BatchesQuestion) -> Batches:
        broker, partition = self._broker(question.partition), question.partition
        end = min(question.end, self._node.committed()[partition])
        size = min(question.size, REMOTE_BYTES)
        read = partial(broker.reader.read_batches, partition, question.start, end, size)
        return Batches(await _read(broker, read))

    async def _time(self, question: TimeQuestion) -> OffsetAnswer:
        broker, partition = self._broker(question.partition), question.partition
        read = partial(broker.reader.offset_for_time, partition, question.time_us)
        return OffsetAnswer(await _read(broker, read))

    async def _history(self, question: HistoryQuestion) -> HistoryAnswer:
        broker = self._broker(question.partition)
        history = broker.reader.topic_history(question.topic, question.partition, question.before)
        return await _read(broker, partial(search, history, question.before))


async def _read(broker: Broker, read: Callable[[], T]) -> T:
    """Reads the log here. Raises `LogMoved` if it has left this node meanwhile."""
    restarts = broker.node.state.journal.restarts
    found = await broker.reads.in_thread(read)
    check_restarts(broker, restarts)
    return found
