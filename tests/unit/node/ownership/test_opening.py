"""CONNECTs of one client at one node, which it finds all at once after it was held up."""

import json

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.connections.accepted_connect import AcceptedConnect
from holdfast.node.context import ClusterContext
from holdfast.node.frame_kinds import SESSION_OPEN, BadFrame
from holdfast.node.frames import (
    CLOSE,
    CloseFrame,
    OpenedFrame,
    OpenFrame,
    decode_frame,
    encode_frame,
)
from holdfast.node.metadata.commands import CHANGES_NOTHING
from holdfast.node.metadata.model import ClusterMetadata, NodeInfo, PartitionInfo
from holdfast.node.metadata.requests import RequestRefused
from holdfast.node.node_state import NodeState
from holdfast.node.ownership.acquisition import (
    ASK_AFTER_S,
    ASK_AGAIN_S,
    REFUSED_AFTER_S,
    SessionAcquisition,
)
from holdfast.node.ownership.coordinator import SessionCoordinator
from holdfast.node.reads.read_barrier import Barriers
from holdfast.node.reads.read_index import MetadataReads
from holdfast.node.session.connection import CLOSED, OPEN, OPENING, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.session.session import Session, new_subscription
from holdfast.node.state.recorded_state import RecordedState
from holdfast.node.state.replicated import ReplicatedState
from holdfast.node.topic_rights.kept_subscriptions import checksum_of
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.decode import decode
from holdfast.protocol.mqtt.packets import Connack, Connect
from tests.support.journal_port import new_state

CLIENT = "c"


class AskedHomes(SessionCoordinator):
    """Notes what it is asked and told."""

    def __init__(
        self, state: NodeState, context: ClusterContext, images: ReplicatedState, barriers: Barriers
    ) -> None:
        super().__init__(state, context, images, barriers, lambda *_: False)
        self.asked: list[int] = []
        self.told_closed: list[int] = []
        self.told_kept: list[list[str]] = []

    def open(self, node: str, frame: OpenFrame) -> None:
        number = frame.request
        assert isinstance(number, int)
        self.asked.append(number)

    def closed(self, node: str, client_id: str, epoch: int) -> None:
        self.told_closed.append(epoch)

    def kept(self, node: str, client_id: str, filters: list[str]) -> None:
        self.told_kept.append(filters)


class LedHere(ClusterContext):
    """By n1, until another node leads."""

    home_leader = "n1"
    home_epoch = 1

    def leader(self, partition: int) -> str:
        return self.home_leader

    def epoch(self, partition: int) -> int:
        return self.home_epoch


class Bench:
    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        config = NodeConfig(partitions=1)
        self.state = new_state(config, journal)
        self.context = context = LedHere("n1", journal)
        context.reaches_majority = lambda now: True
        self.images = RecordedState(config, journal)
        self.reads = MetadataReads(self.propose_nothing)
        context.leading[0] = 1
        self.barriers = Barriers(self.state, context, self.reads)
        images = ReplicatedState(self.images)
        self.homes = AskedHomes(self.state, context, images, self.barriers)
        self.opener = SessionAcquisition(self.state, context, self.homes, self.barriers)

    def propose_nothing(self, now: float) -> int:
        return 1

    def pass_barrier(self) -> None:
        """The metadata is read."""
        self.barriers.advance()
        self.reads.advance(self.state.now)
        self.opener.applied()
        assert self.reads.proposal_done(1, RequestRefused(CHANGES_NOTHING), self.state.now)
        self.barriers.advance()
        self.opener.applied()

    def record(self, epoch: int, owner: str = "n1") -> Session:
        """The `open` record is applied."""
        image = Session(CLIENT)
        image.epoch = epoch
        image.owner = owner
        self.images.sessions[CLIENT] = image
        return image

    def connect(self, expiry_s: int = 3600, *, clean_start: bool = False) -> Connection:
        connection = Connection(1 << 20, "", ListenerRules(""))
        connection.version = 5
        connection.client_id = CLIENT
        connection.state = OPENING
        packet = Connect(5, clean_start, 60, CLIENT)
        connection.connect = packet
        self.opener.open_session(connection, CLIENT, AcceptedConnect(packet, expiry_s, {}))
        return connection

    def answer(self, number: int, epoch: int, *, present: bool = False, node: str = "n1") -> None:
        frame = OpenedFrame(
            request=number, client=CLIENT, epoch=epoch, present=present, lost=False, session=None
        )
        self.opener.opened(node, frame)

    def ask_owned(self, node: str, epochs: object) -> None:
        """The leader of the home, by its own metadata, requests a report."""
        fields = {"ask": True, "partitions": [0], "epochs": epochs, "owned": [], "asking": []}
        self.homes.reports.handle_owned(node, json.dumps(fields).encode())
        self.opener.take_local()

    def wait(self, seconds: float = ASK_AGAIN_S) -> None:
        self.state.now += seconds
        self.opener.handle_timers()


def test_the_newest_connection_gets_the_session() -> None:
    bench = Bench()
    first = bench.connect()
    bench.wait(ASK_AFTER_S)
    second, third = bench.connect(), bench.connect()
    assert [first.state, second.state, third.state] == [CLOSED, CLOSED, OPENING]
    bench.wait()
    assert set(bench.homes.asked) == {1}
    bench.answer(1, epoch=7)
    assert bench.homes.told_closed == [7]
    bench.wait(ASK_AFTER_S)
    assert set(bench.homes.asked) == {1, 3}
    bench.answer(3, epoch=8)
    assert third.state == OPEN
    assert bench.state.sessions[CLIENT].epoch == 8
    assert not bench.opener.asking
    assert bench.opener.timer() is None


def test_nobody_is_asked_for_a_client_that_has_gone() -> None:
    """Its CONNECT and the end of its connection have come together."""
    bench = Bench()
    for _ in range(2):
        bench.connect().state = CLOSED
    there = bench.connect()
    bench.wait()
    assert bench.homes.asked == [3]
    bench.answer(3, epoch=8)
    assert there.state == OPEN


def test_a_client_that_goes_while_its_session_is_opened_holds_nobody_up() -> None:
    bench = Bench()
    gone = bench.connect()
    bench.wait(ASK_AFTER_S)
    gone.state = CLOSED
    bench.answer(1, epoch=7)
    assert bench.homes.told_closed == [7]
    assert not bench.opener.asking
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    bench.answer(2, epoch=8)
    assert there.state == OPEN


def test_a_resumed_session_waits_until_everything_is_known() -> None:
    bench = Bench()
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=7, present=True)
    assert there.state == OPENING
    assert bench.opener.timer() == REFUSED_AFTER_S
    bench.record(epoch=7)
    bench.pass_barrier()
    assert there.state == OPEN


def test_a_session_that_has_ended_meanwhile_is_not_begun() -> None:
    """This node was taken for lost, and the session has expired: a client that is told that it has
    one would miss what is published from here on."""
    bench = Bench()
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=7, present=True)
    bench.pass_barrier()
    assert there.state == CLOSED
    assert not bench.state.sessions
    assert not bench.opener.asking


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_in_doubt_no_session_begins_that_a_record_tells_of(present: bool, is_closed: bool) -> None:
    """What the others have decided about it is not applied here yet."""
    bench = Bench()
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    bench.state.is_ownership_expired = True
    bench.answer(1, epoch=7, present=present)
    bench.record(epoch=7)
    if present:
        bench.pass_barrier()
    bench.opener.applied()
    assert there.state == OPENING
    bench.state.is_ownership_expired = False
    bench.opener.confirm_ownership()
    bench.opener.applied()
    assert there.state == OPENING
    if is_closed:
        bench.record(epoch=7, owner="")
    bench.pass_barrier()
    assert there.state == (CLOSED if is_closed else OPEN)


def test_in_doubt_a_session_without_a_record_begins() -> None:
    bench = Bench()
    bench.state.is_ownership_expired = True
    there = bench.connect(expiry_s=0)
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=7)
    bench.pass_barrier()
    assert there.state == OPEN


def test_who_waits_too_long_for_the_end_of_doubt_is_sent_away() -> None:
    """Another node may serve it. What was opened for it is closed."""
    bench = Bench()
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    bench.state.is_ownership_expired = True
    bench.answer(1, epoch=7, present=True)
    bench.wait(REFUSED_AFTER_S / 2)
    assert there.state == OPENING
    bench.wait(REFUSED_AFTER_S / 2)
    assert there.state == CLOSED
    assert bench.homes.told_closed == [7]
    assert not bench.opener.asking


def test_a_session_that_no_record_tells_of_is_not_begun_by_a_home_that_leads_no_longer() -> None:
    """Such a home has answered that there is no session; this node learns of one."""
    bench = Bench()
    there, other = bench.connect(expiry_s=0), bench.connect(expiry_s=0)
    assert there.state == CLOSED
    bench.wait(ASK_AFTER_S)
    bench.answer(2, epoch=7)
    assert other.state == OPENING
    bench.record(epoch=5, owner="")
    bench.pass_barrier()
    assert other.state == CLOSED
    again = bench.connect(expiry_s=0)
    bench.wait(ASK_AFTER_S)
    bench.record(epoch=8)
    bench.answer(3, epoch=8, present=True)
    bench.pass_barrier()
    assert again.state == OPEN


def test_packet_ids_of_a_resumed_session_are_those_known_here() -> None:
    """Whoever gave the session may be behind in the partitions of its messages: an id that was
    released and stored again since would count as a repetition, and its message be lost."""
    bench = Bench()
    images = bench.homes._replicated
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    image = bench.record(epoch=7)
    image.inbound = {3: 0, 4: 0}
    bench.answer(1, 7, present=True)
    assert there.state == OPENING
    images.inbound[CLIENT] = {(0, 4): 6, (0, 5): 7}
    images.state.sessions[CLIENT].own_rare().trusted = (0, 7)
    bench.pass_barrier()
    assert there.state == OPEN
    assert isinstance(there.session, Session)
    assert there.session.inbound == {4: 0, 5: 0}
    assert there.session.rare.doubtful == {4}


def test_a_second_reply_leaves_the_epoch_in_which_a_session_began() -> None:
    """Otherwise a QoS 2 message of an epoch between the two is stored again."""
    bench = Bench()
    connection = bench.connect(expiry_s=0, clean_start=True)
    bench.wait()
    bench.wait()
    bench.answer(1, 7)
    session = connection.session
    assert isinstance(session, Session)
    bench.answer(1, 9)
    assert (session.epoch, session.life) == (9, 7)


def test_an_answer_of_a_home_that_leads_no_longer_opens_nothing() -> None:
    """The next leader was told that this node only asks, and no record tells it more. It would give
    the client a session at another node, and neither node would let go. [MQTT-3.1.4-3]"""
    bench = Bench()
    bench.context.home_leader = "n4"
    there = bench.connect(expiry_s=0, clean_start=True)
    bench.wait(ASK_AFTER_S)
    bench.context.home_leader = "n1"
    bench.opener.leader_changed(0)
    bench.opener.tell_owned("n1", [0])
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=9, node="n4")
    assert there.state == OPENING
    bench.answer(1, epoch=7)
    assert there.state == OPEN
    bench.answer(1, epoch=9, node="n4")
    assert bench.state.sessions[CLIENT].epoch == 7


def test_a_session_that_waits_is_asked_for_again_where_it_was_not_announced() -> None:
    """Its home got another leader between the answer and the end of the wait."""
    bench = Bench()
    there = bench.connect(expiry_s=0)
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=7)
    assert there.state == OPENING
    bench.opener.tell_owned("n1", [0])
    bench.pass_barrier()
    assert there.state == OPENING
    bench.wait(ASK_AFTER_S)
    assert bench.homes.asked == [1, 1]
    bench.answer(1, epoch=8)
    bench.pass_barrier()
    assert there.state == OPEN
    assert bench.state.sessions[CLIENT].epoch == 8


def test_a_session_that_waits_is_let_go_when_another_node_is_to_have_it() -> None:
    """Else the node says that it does not have it, and begins it afterwards."""
    bench = Bench()
    there = bench.connect(expiry_s=0)
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=7)
    bench.opener.close(CloseFrame(CLIENT, 6))
    assert there.state == OPENING
    bench.opener.close(CloseFrame(CLIENT, 7))
    assert there.state == CLOSED
    assert not bench.opener.asking
    assert bench.homes.told_closed[-1] == 7
    bench.pass_barrier()
    assert not bench.state.sessions


def test_an_answer_of_a_leader_that_was_followed_opens_nothing_though_the_metadata_names_it() -> (
    None
):
    """The disk here takes no metadata, so this node does not learn that n2 leads the home. It has
    reported its sessions to n2 and would begin another one that n2 does not know. [MQTT-3.1.4-3]"""
    bench = Bench()
    there = bench.connect(expiry_s=0, clean_start=True)
    bench.wait(ASK_AFTER_S)
    bench.ask_owned("n2", [2])
    bench.answer(1, epoch=7)
    assert there.state == OPENING
    bench.ask_owned("n3", [1])
    bench.answer(1, epoch=7)
    assert there.state == OPENING
    bench.context.home_leader = "n2"
    bench.context.home_epoch = 2
    bench.answer(1, epoch=7, node="n2")
    assert there.state == OPEN


def test_a_node_that_knows_only_an_earlier_leader_sends_its_clients_elsewhere() -> None:
    bench = Bench()
    bench.ask_owned("n2", [2])
    there = bench.connect(expiry_s=0, clean_start=True)
    bench.wait(ASK_AFTER_S)
    bench.wait(REFUSED_AFTER_S)
    assert there.state == CLOSED
    assert not bench.state.sessions


def test_a_connect_is_not_refused_because_the_metadata_comes_after_the_request_for_a_report() -> (
    None
):
    """Its home had no leader for a while, and the frames of two nodes come in any order."""
    bench = Bench()
    bench.context.home_leader = ""
    there = bench.connect(expiry_s=0, clean_start=True)
    bench.wait(2 * REFUSED_AFTER_S)
    bench.ask_owned("n2", [2])
    bench.wait(ASK_AFTER_S)
    assert there.state == OPENING
    bench.context.home_leader = "n2"
    bench.context.home_epoch = 2
    bench.wait()
    bench.answer(1, epoch=7, node="n2")
    assert there.state == OPEN


class Lagging(Bench):
    """This node is n1. Partition 0 is led by n2, and has committed 5 records that are not applied
    here."""

    def __init__(self, in_sync: tuple[str, ...] = ("n2", "n3"), min_insync: int = 2) -> None:
        super().__init__()
        self.context.leading[0] = 0
        self.context.home_leader = "n2"
        self.context.connected |= {"n2", "n3"}
        names = ("n1", "n2", "n3")
        nodes = {name: NodeInfo(name, "i1", "", f"{name}:1883", "") for name in names}
        info = PartitionInfo(names, (), "n2", 1, in_sync)
        self.context.metadata = ClusterMetadata("c", 3, min_insync, nodes, (info,), 1, names)

    def read(self) -> None:
        """The metadata is read, and the leader reports its end."""
        self.barriers.advance()
        self.reads.advance(self.state.now)
        self.reads.proposal_done(1, RequestRefused(CHANGES_NOTHING), self.state.now)
        (barrier,) = self.barriers.waiting.values()
        self.barriers.handle_reply(barrier.question, [(0, 1, 5)])
        self.barriers.advance()

    def lag(self) -> Connection:
        """A client resumes its session here."""
        self.record(epoch=7)
        there = self.connect()
        self.wait(ASK_AFTER_S)
        self.answer(1, epoch=7, present=True, node="n2")
        self.read()
        self.wait(REFUSED_AFTER_S + ASK_AGAIN_S)
        return there


def connack(connection: Connection) -> Connack:
    assert connection.out is not None
    data = b"".join(connection.out)
    packet = decode(data, data[0], 2, len(data), 5, False)
    assert isinstance(packet, Connack)
    return packet


def test_a_node_that_lags_names_the_nodes_that_can_resume_the_session() -> None:
    """A client that waits here longer would not find out that the others can."""
    bench = Lagging()
    refused = connack(bench.lag())
    assert refused.reason == reasons.USE_ANOTHER_SERVER
    assert refused.properties[p.SERVER_REFERENCE] == "n2:1883 n3:1883"
    assert not bench.opener.asking


def test_a_node_that_is_known_to_lag_refuses_at_once_and_takes_no_session() -> None:
    bench = Lagging()
    bench.lag()
    bench.context.outgoing.clear()
    again = bench.connect()
    bench.wait(ASK_AFTER_S)
    assert connack(again).reason == reasons.USE_ANOTHER_SERVER
    assert not bench.context.outgoing
    bench.state.delivered[0] = 5
    bench.barriers.advance()
    there = bench.connect()
    bench.wait(ASK_AFTER_S)
    assert [kind for _, kind, _ in bench.context.outgoing] == [SESSION_OPEN]
    assert there.state == OPENING


def test_a_node_that_lags_begins_new_sessions() -> None:
    bench = Lagging()
    bench.lag()
    there = bench.connect(clean_start=True)
    bench.wait(ASK_AFTER_S)
    bench.answer(2, epoch=8, node="n2")
    assert there.state == OPEN


@pytest.mark.parametrize(
    ("in_sync", "min_insync"), [(("n2", "n1"), 2), (("n2",), 2), (("n2", "n3", "n1"), 2)]
)
def test_a_client_waits_if_no_other_node_can_resume_its_session(
    in_sync: tuple[str, ...], min_insync: int
) -> None:
    """The partition commits nothing, or what it commits waits for this node."""
    bench = Lagging(in_sync, min_insync)
    there = bench.lag()
    bench.wait(REFUSED_AFTER_S)
    assert there.state == OPENING


def test_a_leader_of_an_older_version_requests_a_report_without_its_epochs() -> None:
    bench = Bench()
    there = bench.connect(expiry_s=0, clean_start=True)
    fields = {"ask": True, "partitions": [0], "owned": [], "asking": []}
    bench.homes.reports.handle_owned("n2", json.dumps(fields).encode())
    bench.opener.take_local()
    bench.wait(ASK_AFTER_S)
    bench.answer(1, epoch=7)
    assert there.state == OPEN


@pytest.mark.parametrize("epochs", [2, ["2"], [2, 2], [], {"0": 2}])
def test_a_request_for_a_report_with_bad_epochs_is_a_bad_frame(epochs: object) -> None:
    with pytest.raises(BadFrame):
        Bench().ask_owned("n2", epochs)


def live_session(bench: Bench, filters: list[str]) -> Session:
    session = Session(CLIENT)
    session.epoch = 7
    session.expiry_s = 3600
    for each in filters:
        bench.state.set_subscription(new_subscription(session, each, 1, False, False, 0, 0))
    session.connection = Connection(1 << 20, "", ListenerRules(""))
    session.connection.state = OPEN
    session.connection.session = session
    bench.state.sessions[CLIENT] = session
    return session


@pytest.mark.parametrize("filters", [[], ["a"], ["a", "b", "c"]])
def test_an_owner_keeps_a_session_with_filters_that_are_not_decided(filters: list[str]) -> None:
    bench = Bench()
    session = live_session(bench, ["b", "a"])
    bench.opener.close(CloseFrame(CLIENT, 7, checksum_of(filters)))
    assert session.connection is not None
    assert bench.homes.told_kept == [["b", "a"]]


@pytest.mark.parametrize("epoch", [7, 6])
@pytest.mark.parametrize("filters", [None, ["a", "b"]])
def test_an_owner_releases_a_session_all_of_whose_filters_are_decided(
    filters: list[str] | None, epoch: int
) -> None:
    bench = Bench()
    session = live_session(bench, ["b", "a"])
    order = CloseFrame(CLIENT, epoch, None if filters is None else checksum_of(filters))
    bench.opener.close(order)
    assert not bench.homes.told_kept
    assert (session.connection is None) == (epoch == 7)


def test_an_owner_keeps_a_session_while_a_subscribe_waits_for_the_log() -> None:
    """It would be in the session that the next node gets, and nobody has asked about it."""
    bench = Bench()
    session = live_session(bench, ["a"])
    session.subscribes_awaited = 1
    bench.opener.close(CloseFrame(CLIENT, 7, checksum_of(["a"])))
    assert session.connection is not None
    session.subscribes_awaited = 0
    bench.opener.close(CloseFrame(CLIENT, 7, checksum_of(["a"])))
    assert session.connection is None


def test_a_session_that_ends_with_its_connection_is_released_whatever_it_has() -> None:
    bench = Bench()
    session = live_session(bench, ["a"])
    session.expiry_s = 0
    bench.opener.close(CloseFrame(CLIENT, 7, checksum_of([])))
    assert session.connection is None


def test_frames_without_a_checksum_are_those_of_older_versions() -> None:
    assert encode_frame(CloseFrame("c", 1)) == b'{"client":"c","epoch":1}'
    frame = OpenFrame(1, "c", False, 0, None)
    assert b"filters" not in encode_frame(frame)
    older = decode_frame(CLOSE, b'{"client":"c","epoch":1,"later":2}')
    assert (older.filters, older.kept) == (None, None)
