"""Epochs of sessions: each above all that the client had before, also if nobody remembers it."""

from holdfast.log.journal.journal import Journal
from holdfast.log.record import FLAG_PACKET_ID, MESSAGE, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frames import OpenFrame
from holdfast.node.ownership.owners import EPOCH_ORIGIN_S, RANGE, SECONDS_MAX, STEP, Owners
from holdfast.node.ownership.requests import SessionRequest
from holdfast.node.session.session import Session
from holdfast.node.state.client_epochs import ClientEpochs
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from holdfast.node.state.transfer import entries, take

TODAY_US = 1_760_000_000_000_000
YEAR_US = 365 * 86_400 * 1_000_000


def new_images() -> ReplicatedState:
    state = RecordedState(NodeConfig(node_id="n1", partitions=1), Journal(1, replicated=True))
    state.wall_us = TODAY_US
    return ReplicatedState(state)


def give(images: ReplicatedState, client_id: str, wall_us: int) -> int:
    """By a leader that has just begun to lead."""
    images.state.wall_us = wall_us
    context = ClusterContext("n1", images.state.journal)
    owners = Owners(images.state, context, images, lambda client_id, goes_on: None)
    return owners.next_epoch(SessionRequest("n1", OpenFrame(1, client_id, False, 60, None)), None)


def live(images: ReplicatedState, client_id: str, epoch: int) -> None:
    """A session begins and ends."""
    session = Session(client_id)
    session.epoch = epoch
    session.expiry_s = 60
    key = session.key
    opened = encode_session(open_record(session, True, "n1"))
    images.apply(Record(0, SESSION, client_id=key, sequence=epoch, payload=opened))
    ended = f'{{"op":"end","client":"{client_id}"}}'.encode()
    images.apply(Record(0, SESSION, client_id=key, sequence=epoch, payload=ended))


def test_a_clock_that_was_set_back_gives_no_epoch_twice() -> None:
    images = new_images()
    images.ended = [ClientEpochs(2)]
    first = give(images, "c", TODAY_US)
    assert first == TODAY_US // 1_000_000 - EPOCH_ORIGIN_S + RANGE
    live(images, "c", first)
    for number in range(3):
        live(images, f"other{number}", first + 1 + number)
    assert "c" not in images.ended[0]
    assert give(images, "c", TODAY_US - YEAR_US) > first
    assert give(images, "c", TODAY_US + YEAR_US) == first + YEAR_US // 1_000_000

    restarted = new_images()
    for kind, data in images.snapshot():
        restarted.apply_snapshot_entry(kind, data)
    assert give(restarted, "c", TODAY_US - YEAR_US) > first

    replaced = new_images()
    for entry in entries(images, {0}):
        if entry is not None:
            take(replaced, *entry)
    assert give(replaced, "c", TODAY_US - YEAR_US) > first
    assert not replaced.fired


def test_a_clock_far_ahead_uses_up_no_epochs() -> None:
    """They have 32 bits in a record. Each later session gets a higher one."""
    images = new_images()
    epoch = give(images, "c", TODAY_US + 500 * YEAR_US)
    assert epoch == SECONDS_MAX + RANGE
    live(images, "c", epoch)
    assert give(images, "d", TODAY_US) == epoch + STEP + RANGE


def test_an_epoch_is_above_those_of_the_clients_packet_ids() -> None:
    """No record tells of a session that is over with its connection, but its QoS 2 messages name
    its epoch. Counter-example: the next session gets the same one from another leader within a
    second, uses a packet id of a message that was not released, and its own message is taken for a
    repetition: it is acknowledged and not stored."""
    images = new_images()
    first = give(images, "c", TODAY_US)
    record = Record(
        0,
        MESSAGE,
        flags=FLAG_PACKET_ID | 2,
        topic=b"t",
        client_id=b"c",
        sequence=1,
        producer_epoch=first,
    )
    images.apply(record)
    assert images.inbound_at("c", 0, 1) == first
    second = give(images, "c", TODAY_US)
    assert second > first
