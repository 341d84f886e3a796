"""Emptying messages that `per_topic_last` no longer keeps, without moving any offset.

An emptied message leaves its head behind as a CONTROL record without topic and payload, so offsets
stay dense, batches keep their place and count, and a segment still begins at its sequence. Only
segments that retention.count_settled names may be rewritten: no session counts on them, and
recovery begins after them. Records of other kinds stay as they are.
"""

from collections.abc import Mapping

from holdfast.log.record import CONTROL, MESSAGE, Batch, BatchBuilder


class SegmentCompactor:
    """Rewrites the batches of one segment, in their order.

    `beyond`: how many of a topic's oldest messages in this segment go, see
    retention.messages_beyond.
    """

    def __init__(self, beyond: Mapping[bytes, int]) -> None:
        self._beyond = dict(beyond)
        self.emptied = 0
        self.bytes_freed = 0

    def rewrite(self, batch: Batch) -> bytes:
        """The batch with what goes emptied; the same bytes if nothing of it does."""
        emptied = self.emptied
        builder = BatchBuilder(batch.partition, batch.base_offset)
        for record in batch.records():
            left = self._beyond.get(record.topic, 0) if record.kind == MESSAGE else 0
            if left:
                self._beyond[record.topic] = left - 1
                self.emptied += 1
                builder.add(CONTROL, 0, record.timestamp_us, b"", b"", b"", 0, 0, b"", b"", False)
            else:
                builder.add(
                    record.kind,
                    record.flags,
                    record.timestamp_us,
                    record.topic,
                    record.client_id,
                    record.producer,
                    record.producer_epoch,
                    record.sequence,
                    record.properties,
                    record.payload,
                    False,
                )
        if self.emptied == emptied:
            return bytes(batch.data[batch.start : batch.start + batch.length])
        builder.attributes = batch.attributes
        data = builder.build(batch.epoch)
        self.bytes_freed += batch.length - len(data)
        return data


def is_worthwhile(counts: Mapping[bytes, int], beyond: Mapping[bytes, int]) -> bool:
    """Does at least half of a segment's messages go? Rewriting for less costs more disk time than
    it saves space, and the rest goes with a later, larger share."""
    return 2 * sum(beyond.values()) >= max(1, sum(counts.values()))
