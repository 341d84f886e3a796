"""Compares a leader's and a follower's log by epoch (KIP-101, KIP-279).

Two logs that both have a batch of one epoch at an offset are equal up to there. The follower sends
the last epoch of its log and the end of that log. The leader checks whether that point is in its
own log. If not, it names the nearest lower epoch that it has, and where that ends. The follower
cuts its log there, or where its own part of that epoch ends, and asks again. Each question has an
older epoch or a lower end, so the exchange terminates.

Cutting at the high watermark would be wrong in both directions. The follower's watermark lags:
record 5 is committed, B's watermark is 5, B cuts record 5 and then leads (KIP-101). And records
above it may differ without being cut: A and B both have a record 5, of different epochs.
"""

from holdfast.node.frame_kinds import BadFrame
from holdfast.node.replicate.codec import CUT, FOLLOW_FROM_ENTRY, GO_ON, RESET, FollowEntry
from holdfast.node.replicate.log import ReplicaLog
from holdfast.node.replicate.progress import CATCHING_UP, LIVE, LedPartition, Progress


def compare(log: ReplicaLog, led: LedPartition, progress: Progress, entry: FollowEntry) -> bytes:
    """The leader's reply to a follower; on GO_ON, its progress begins where the logs agree. Returns
    b"" if the follower must leave the in-sync set first.

    Raises `BadFrame` if the request contradicts itself.
    """
    partition, epoch, request, last_epoch, end, durable = entry
    if last_epoch > epoch or durable > end:
        raise BadFrame(
            f"partition {partition}: asks under epoch {epoch} with a log of epoch {last_epoch} "
            f"that ends at {end}, durable to {durable}"
        )
    progress.stop()
    watermark = log.high_watermark[partition]
    if progress.is_counted and end < watermark:
        progress.is_lost = True
    cut_epoch, offset = log.epoch_end(partition, last_epoch)
    action = _action(log, led, progress, entry, cut_epoch, offset)
    if action == RESET:
        if progress.is_counted:
            return b""
        offset = log.start_offsets[partition]
    elif action == GO_ON:
        if end > led.end:
            raise BadFrame(f"partition {partition}: has {end} of {led.end} records")
        offset = end
        progress.sent = end
        progress.matched = durable
        progress.state = LIVE if end == led.end else CATCHING_UP
    return FOLLOW_FROM_ENTRY.pack(partition, epoch, request, action, cut_epoch, offset, watermark)


def _action(
    log: ReplicaLog,
    led: LedPartition,
    progress: Progress,
    entry: FollowEntry,
    cut_epoch: int,
    offset: int,
) -> int:
    partition, _, _, last_epoch, end, _ = entry
    start = log.start_offsets[partition]
    if last_epoch == 0:
        # An empty log has no record that could differ.
        return GO_ON if start <= end <= led.end else RESET
    if end < start:
        return RESET
    if cut_epoch == last_epoch and end <= offset:
        return GO_ON
    if cut_epoch == 0:
        # All records that are left here are newer. A replica in sync has everything below our
        # start, which is committed, so it can cut there. For any other follower the logs cannot be
        # compared.
        if not progress.is_counted:
            return RESET
        return GO_ON if end == offset else CUT
    return CUT


def cut_offset(log: ReplicaLog, partition: int, cut_epoch: int, offset: int) -> int:
    """The offset at which a follower cuts its log, given the leader's reply."""
    if cut_epoch == 0:
        return offset
    epoch, end = log.epoch_end(partition, cut_epoch)
    # If we do not have that epoch, the leader's end of it says nothing about our older epochs.
    return min(offset, end) if epoch == cut_epoch else end
