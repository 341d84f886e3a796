"""A home leader that may not decide yet, because it does not know what the one before decided; and
whose sessions those of a lost node are that no record tells of."""

import json

import pytest
from msgspec.structs import replace

from holdfast.log.journal.journal import Journal
from holdfast.log.record import CONTROL, SESSION, Record
from holdfast.node.config import NodeConfig
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import SESSION_CLOSE, SESSION_OPENED, SESSION_OWNED
from holdfast.node.frames import CloseFrame, OpenFrame
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.metadata.model import NodePhase as StateOfNode
from holdfast.node.metadata.requests import RequestRefused
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.session import Session
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.state.session_records import encode_session, open_record
from tests.support.journal_port import new_state, release_promises


class Bench:
    """n1 begins to lead partition 0, of which one record is not committed."""

    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        journal.append(Record(0, CONTROL))
        config = NodeConfig(partitions=1)
        self.state = new_state(config, journal)
        self.context = ClusterContext("n1", journal)
        self.context.connected.add("n2")
        self.context.leading[0] = 2
        self.reads = MetadataReads(lambda now: 1)
        barriers = Barriers(self.state, self.context, self.reads)
        self.images = ReplicatedState(RecordedState(config, journal))
        self.homes = SessionCoordinator(
            self.state, self.context, self.images, barriers, lambda *_: False
        )
        self.homes.start_leading(0)

    def lose(self, node: str) -> None:
        """By the metadata."""
        nodes = {name: NodeInfo(name, "i1", f"{name}:1", "", "") for name in ("n1", "n2", "n3")}
        nodes[node] = replace(nodes[node], state=StateOfNode.DOWN)
        partition = PartitionInfo(tuple(nodes), (), "n1", 2, tuple(nodes))
        self.context.metadata = ClusterMetadata("c", 3, 1, nodes, (partition,), 1, tuple(nodes))
        self.homes.node_gone(node)

    def closes(self) -> list[str]:
        """Nodes that are to let go of a session."""
        return [node for node, kind, _ in self.context.outgoing if kind == SESSION_CLOSE]

    def asked(self) -> list[str]:
        """Nodes that are to announce what they own."""
        return [node for node, kind, _ in self.context.outgoing if kind == SESSION_OWNED]

    def ask(self, request: int, client_id: str, node: str = "n2") -> None:
        self.homes.open(node, OpenFrame(request, client_id, True, 0, None))
        self.agree()
        self.release()

    def agree(self) -> None:
        """The metadata is read: a majority still has this leader."""
        self.reads.advance(self.state.now)
        self.reads.proposal_done(1, RequestRefused(CHANGES_NOTHING), self.state.now)
        self.homes.releases.advance()

    def release(self) -> None:
        """What was appended is committed."""
        release_promises(self.state)

    def early(self) -> int:
        postponed = sum(len(kept) for kept in self.homes.decisions.postponed.values())
        return postponed + len(self.homes.reports._reports)

    def commit(self) -> None:
        self.state.delivered[0] = 1
        self.homes.committed(0)
        self.release()

    def opened(self) -> int:
        return sum(kind == SESSION_OPENED for _, kind, _ in self.context.outgoing)


def test_what_is_asked_again_takes_no_more_room() -> None:
    """A node asks several times a second, for as long as too few replicas are there."""
    bench = Bench()
    for _ in range(1000):
        bench.ask(1, "a")
        bench.ask(2, "b")
        bench.homes.closed("n2", "c", 5)
        bench.homes.reports.receive("n2", [0], {"d": 1}, ["a", "b"])
    assert bench.early() == 4
    assert bench.opened() == 0
    bench.commit()
    assert bench.opened() == 2
    assert bench.early() == 0


def test_a_node_that_is_down_and_lives_lets_go_of_a_session_without_a_record() -> None:
    """Its disk is full, or hangs. Its client has come to another node. [MQTT-3.1.4-3]"""
    bench = Bench()
    bench.context.connected.add("n3")
    bench.commit()
    bench.ask(1, "a")
    bench.lose("n2")
    bench.ask(2, "a", "n3")
    assert bench.opened() == 2
    assert bench.closes() == ["n2"]
    bench.homes.closed("n2", "a", 1 << 60)
    bench.ask(3, "a", "n3")
    assert bench.closes() == ["n2", "n3"]
    owner = bench.homes.owners.owner("a")
    assert owner is not None
    bench.homes.closed("n3", "a", owner.epoch)
    assert bench.opened() == 3


def test_a_leader_that_was_down_by_the_metadata_knows_its_own_sessions() -> None:
    """It was cut off and leads again, and applies only then that it was down. It has no link over
    which it would report them again. [MQTT-3.1.4-3]"""
    bench = Bench()
    bench.commit()
    bench.homes.reports.receive("n1", [0], {"a": 7}, [])
    bench.lose("n1")
    assert bench.homes.owners.owner("a") is not None
    bench.ask(1, "a")
    assert bench.opened() == 1
    assert CloseFrame("a", 7) in bench.homes.answers.local


def test_of_two_nodes_that_have_a_session_one_lets_go_though_their_epochs_are_equal() -> None:
    """No record tells of the session of n3, so a new leader that has not heard n3 yet gives the
    same epoch once more, to n2. Counter-example: both keep it, and messages of a shared group at
    QoS 0 go to a client that has left n3 long ago. [MQTT-3.1.4-3]"""
    bench = Bench()
    bench.commit()
    bench.ask(1, "a")
    owner = bench.homes.owners.owner("a")
    assert owner is not None
    assert bench.opened() == 1
    bench.context.connected.add("n3")
    bench.homes.reports.receive("n3", [0], {"a": owner.epoch}, [])
    assert bench.closes() == ["n3"]
    bench.homes.closed("n3", "a", owner.epoch)
    bench.homes.reports.receive("n3", [0], {}, [])
    assert bench.homes.owners.owner("a") is owner
    bench.homes.reports.receive("n2", [0], {"a": owner.epoch}, [])
    assert bench.closes() == ["n3"]


@pytest.mark.parametrize("order", [("n2", "n3"), ("n3", "n2")])
def test_of_two_nodes_that_have_a_session_the_earlier_one_lets_go(order: tuple[str, str]) -> None:
    """In whatever order they announce it."""
    bench = Bench()
    bench.commit()
    epochs = {"n2": 7, "n3": 8}
    bench.context.connected.add("n3")
    for node in order:
        bench.homes.reports.receive(node, [0], {"a": epochs[node]}, [])
    assert bench.closes() == ["n2"]
    owner = bench.homes.owners.owner("a")
    assert owner is not None
    assert owner.node == "n3"


def test_nothing_is_remembered_of_a_node_that_is_down_and_out_of_reach() -> None:
    bench = Bench()
    bench.commit()
    bench.ask(1, "a")
    bench.homes.disconnected("n2")
    assert bench.homes.owners._owners
    bench.lose("n2")
    bench.context.connected.discard("n2")
    bench.homes.disconnected("n2")
    assert not bench.homes.owners._owners


def test_a_node_is_asked_again_about_a_session_that_its_client_only_asked_for() -> None:
    """The `open` of a process that has ended is committed late. The client comes to the next
    process, and goes before it has the session: its request is withdrawn."""
    bench = Bench()
    bench.commit()
    session = Session("a")
    session.epoch = 4
    session.expiry_s = 60
    payload = encode_session(open_record(session, False, "n2", 1))
    bench.images.apply(Record(0, SESSION, client_id=b"a", sequence=4, payload=payload))
    appended = bench.context.journal.next_offset[0]
    bench.homes.reports.receive("n2", [0], {}, ["a"])
    bench.homes.handle_timers()
    assert bench.asked() == []
    due = bench.homes.timer()
    assert due is not None
    for _ in range(2):
        bench.state.now = bench.homes.timer() or 0.0
        bench.homes.handle_timers()
        bench.homes.reports.receive("n2", [0], {}, ["a"])
    assert bench.asked() == ["n2", "n2"]
    assert bench.context.journal.next_offset[0] == appended
    bench.homes.reports.receive("n2", [0], {}, [])
    assert bench.context.journal.next_offset[0] == appended + 1
    session.epoch = 5
    payload = encode_session(open_record(session, False, "n2", 2))
    bench.images.apply(Record(0, SESSION, client_id=b"a", sequence=5, payload=payload))
    bench.state.now = bench.homes.timer() or bench.state.now
    bench.homes.handle_timers()
    assert bench.asked() == ["n2", "n2"]
    assert bench.homes.timer() is None


def test_a_request_for_a_report_says_in_which_epochs_its_sender_leads() -> None:
    """Else a node that has not heard of the new leader takes answers of the earlier one."""
    bench = Bench()
    bench.commit()
    bench.homes.reports.flush()
    bench.homes.connected("n2")
    payloads = [each for _, kind, each in bench.context.outgoing if kind == SESSION_OWNED]
    assert len(payloads) == 2
    for payload in payloads:
        assert isinstance(payload, bytes)
        assert json.loads(payload)["epochs"] == [2]


def test_a_session_without_a_record_is_let_go_for_one_that_a_record_names() -> None:
    """n3 has the highest epoch of the last leader, and reports it after this one has given a
    session with a record to n2. Counter-example: no record ends the session of n3, and neither node
    lets go. [MQTT-3.1.4-3]"""
    bench = Bench()
    bench.context.connected.add("n3")
    bench.commit()
    image = Session("a")
    image.epoch, image.owner = 7, "n2"
    bench.images.state.sessions["a"] = image
    bench.homes.reports.receive("n3", [0], {"a": 8}, [])
    assert bench.closes() == ["n3"]
    owner = bench.homes.owners.owner("a")
    assert owner is not None
    assert owner.node == "n2"


def test_a_node_that_reports_a_session_while_another_owner_releases_it_lets_go_of_it() -> None:
    """Counter-example: a request waits for n2, then n3 reports a higher epoch, and n2 releases the
    session. It is given to n4, and nothing tells n3. [MQTT-3.1.4-3]"""
    bench = Bench()
    bench.context.connected |= {"n3", "n4"}
    bench.commit()
    bench.ask(2, "b", "n4")
    bench.homes.reports.receive("n2", [0], {"a": 7}, [])
    bench.ask(1, "a", "n4")
    assert bench.closes() == ["n2"]
    bench.homes.reports.receive("n3", [0], {"a": 8}, [])
    bench.homes.closed("n2", "a", 7)
    assert bench.opened() == 2
    assert bench.closes()[-1] == "n3"


def test_an_order_to_release_a_session_is_repeated_when_it_is_given_away() -> None:
    bench = Bench()
    bench.context.connected.add("n3")
    bench.commit()
    bench.ask(1, "a")
    bench.ask(2, "a", "n3")
    assert bench.closes() == ["n2"]
    bench.state.now = bench.homes.timer() or 0.0
    bench.homes.handle_timers()
    assert bench.opened() == 2
    assert bench.closes() == ["n2", "n2"]
