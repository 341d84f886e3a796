"""What a home does with a CONNECT whose client, or whose node's process, is not there any more."""

import pytest
from msgspec import Struct

from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frames import OpenedFrame, OpenFrame
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import NOTHING, MetadataReads
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from tests.support.journal_port import new_state, release_promises


class Home:
    """n1 leads the only partition; sessions are not recorded, so answers come at once."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        config = NodeConfig(partitions=1)
        self.state = new_state(config, journal)
        context = ClusterContext("n1", journal)
        context.connected.update(("n2", "n3"))
        context.leading[0] = 2
        barriers = Barriers(self.state, context, MetadataReads(lambda now: NOTHING))
        self.homes = SessionCoordinator(
            self.state,
            context,
            ReplicatedState(RecordedState(config, journal)),
            barriers,
            lambda *_: False,
        )
        self.homes.start_leading(0)
        self.answers: list[tuple[str, OpenedFrame]] = []
        context.send_frame = self._sent  # type: ignore[method-assign]

    def _sent(self, node: str, kind: int, frame: Struct) -> None:
        if isinstance(frame, OpenedFrame):
            self.answers.append((node, frame))

    def ask(self, node: str, request: int, *, gone: bool = False, user: str = "") -> None:
        self.homes.open(node, OpenFrame(request, "c", True, 0, None, gone=gone, user=user))
        release_promises(self.state)

    def told(self) -> list[tuple[str, int, bool]]:
        return [(node, frame.request, frame.lost) for node, frame in self.answers]


@pytest.fixture
def home() -> Home:
    """n2 has the session of c."""
    home = Home()
    home.ask("n2", 1)
    assert home.told() == [("n2", 1, False)]
    home.answers.clear()
    return home


def test_a_client_that_has_gone_takes_the_session_from_nobody(home: Home) -> None:
    home.ask("n3", 7, gone=True)
    assert home.told() == [("n3", 7, True)]
    home.ask("n2", 1)
    assert home.told()[1:] == [("n2", 1, False)]


def test_a_request_that_waits_is_withdrawn(home: Home) -> None:
    home.ask("n3", 7)
    home.ask("n3", 8)
    assert home.told() == []
    home.ask("n3", 8, gone=True)
    home.ask("n3", 7, gone=True)
    assert home.told() == [("n3", 8, True), ("n3", 7, True)]
    home.homes.closed("n2", "c", 1 << 40)
    assert len(home.answers) == 2


def test_what_was_opened_is_told_to_whom_it_was_opened_for(home: Home) -> None:
    """It is the asker that closes it."""
    home.ask("n2", 1, gone=True)
    assert home.told() == [("n2", 1, False)]


@pytest.mark.parametrize("knows", [True, False])
def test_requests_of_a_process_before_are_forgotten(home: Home, knows: bool) -> None:
    home.ask("n3", 7)
    home.homes.reports.receive("n3", [0], {}, ["c"] if knows else [])
    home.homes.closed("n2", "c", 1 << 40)
    assert home.told() == ([("n3", 7, False)] if knows else [])


def test_no_request_of_a_process_before_begins_when_the_one_in_front_is_forgotten() -> None:
    """It would be refused at once here, because the session belongs to another user."""
    home = Home()
    for node, request, user in (("n2", 1, "u"), ("n3", 7, "u"), ("n3", 8, "v")):
        home.ask(node, request, user=user)
    home.homes.reports.receive("n3", [0], {}, [])
    assert home.told() == [("n2", 1, False)]
    home.ask("n3", 9, user="u")
    home.homes.closed("n2", "c", 1 << 40)
    assert home.told()[1:] == [("n3", 9, False)]
