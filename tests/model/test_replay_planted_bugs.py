"""Bugs in subscriptions that begin in the past, planted: the model of `test_replay_sessions` finds
each."""

from copy import copy

import pytest

from holdfast.log.record import Record
from holdfast.node.delivery import delivery, live_lane, log_replay, read_results, replay
from holdfast.node.delivery.read_results import QueueRead
from holdfast.node.delivery.transmission import send_qos0
from holdfast.node.node_state import NodeState, Route
from holdfast.node.publish import apply
from holdfast.node.session.cursor import LiveLane, WaitingQos0
from holdfast.node.session.message import Message
from holdfast.node.session.session import Session, Subscription
from holdfast.node.state import session_records
from tests.model.test_replay_qos0 import run as run_mixed
from tests.model.test_replay_sessions import run
from tests.support.node_bench import NodeBench
from tests.support.planted import is_found
from tests.unit.node.delivery import test_replay as test_node_replay


def test_planted_others_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's other subscriptions keep their starts: what they had comes again."""

    def planted(session: Session, positions: list[int], starts: object) -> None:
        kept = {each: each.start for each in session.subscriptions.values()}
        session_records.go_back(session, positions, starts)  # type: ignore[arg-type]
        for each, start in kept.items():
            each.start = start

    monkeypatch.setattr(replay, "go_back", planted)
    assert is_found(run, range(60))


def test_planted_reads_before_the_log_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session reads on while its SUBSCRIBE is on the way to the log."""

    def planted(session: Session, positions: list[int], starts: object) -> None:
        session_records.go_back(session, positions, starts)  # type: ignore[arg-type]
        session.replays_awaited -= 1

    monkeypatch.setattr(replay, "go_back", planted)
    assert is_found(run, range(60))


def test_planted_position_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's position does not go back as far as the start."""

    def planted(session: Session, positions: list[int], starts: list[list[int]]) -> None:
        session_records.go_back(session, positions, [[each + 1 for each in s] for s in starts])

    monkeypatch.setattr(replay, "go_back", planted)
    assert is_found(run, range(60))


def test_planted_cancelled_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of a read from before the SUBSCRIBE is taken for one after it."""

    def planted(session: Session) -> None:
        session.reading = False
        session.tailing = False
        session.tailed_while_reading = None
        session.recount()

    monkeypatch.setattr(Session, "cancel_read", planted)
    # The model meets it in one of some hundred worlds.
    with pytest.raises(AssertionError):
        test_node_replay.test_a_second_replay_during_the_read_of_the_first(NodeBench())


def test_planted_all_topics_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a replayed topic overtake the replay."""

    def planted(lane: LiveLane, topic: str) -> bool:
        return lane.is_open

    def of_live_only(*arguments: object) -> bool:
        state, session, target, message = arguments
        target = copy(target)
        target.replay = None  # type: ignore[attr-defined]
        return live_lane.overtake(state, session, target, message)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveLane, "takes", planted)
    monkeypatch.setattr(delivery, "overtake", of_live_only)
    assert is_found(run, range(60))


def test_planted_replay_repeats_what_overtook_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay does not pass the records that overtook it."""
    monkeypatch.setattr(Session, "note_done", lambda *_: None)
    assert is_found(run, range(60))


def test_planted_frames_behind_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of QoS 0 are framed also behind the first delivery of a read."""
    queue = QueueRead._queue

    def planted(work: QueueRead, state: NodeState, record: Record) -> int:
        before, work.deliveries = work.deliveries, []
        steps = queue(work, state, record)
        work.deliveries = before + work.deliveries
        return steps

    monkeypatch.setattr(QueueRead, "_queue", planted)
    assert is_found(run_mixed, range(120))


def test_planted_frames_before_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames go out although earlier messages wait for the window."""
    monkeypatch.setattr(read_results, "can_send", lambda *_: True)
    assert is_found(run_mixed, range(480, 600))


def test_planted_frames_that_wait_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that cannot go out at once do not become deliveries."""
    send = QueueRead._send_frames

    def planted(work: QueueRead, state: NodeState) -> None:
        before = work.deliveries
        send(work, state)
        work.deliveries = before

    monkeypatch.setattr(QueueRead, "_send_frames", planted)
    assert is_found(run_mixed, range(120))


def test_planted_live_qos0_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live message of QoS 0 goes out at once, although its topic is replayed."""

    def planted(
        state: NodeState, route: Route, targets: list[Subscription], message: Message
    ) -> None:
        for target in targets:
            if not (target.reads_log and route.logged):
                send_qos0(state, target, message)

    monkeypatch.setattr(delivery, "deliver_qos0", planted)
    assert is_found(run_mixed, range(120))


def test_planted_waiting_qos0_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting messages of QoS 0 go out at the end of the replay, behind later ones of QoS 1."""
    monkeypatch.setattr(WaitingQos0, "pop_before", lambda *_: None)
    assert is_found(run_mixed, range(120))


def test_planted_frames_before_waiting_qos0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of a read go out before a message that waits for an earlier place."""
    monkeypatch.setattr(WaitingQos0, "precedes", lambda *_: False)
    assert is_found(run_mixed, range(120))


def test_planted_logged_qos0_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logged message of QoS 0 is not delivered at its commit to a reader at the tail."""
    monkeypatch.setattr(apply, "deliver_committed_qos0", lambda *_: None)
    assert is_found(run_mixed, range(120))


def test_planted_lane_begins_at_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane of a session that was away takes live messages before it has caught up."""

    def planted(session: Session, filters: list[str]) -> None:
        live_lane.open_lane_behind(session, filters)
        if session.lane is not None:
            session.lane.positions = None

    monkeypatch.setattr(log_replay, "open_lane_behind", planted)
    assert is_found(run, range(60))
