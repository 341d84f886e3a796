"""CONNECTs of one client at one node, which it finds all at once after it was held up."""

from holdfast.cluster.fabric import Fabric
from holdfast.cluster.homes import Homes
from holdfast.cluster.images import Images
from holdfast.cluster.opening import ASK_AFTER_S, ASK_AGAIN_S, Opener
from holdfast.log.journal import Journal
from holdfast.mqtt.packets import Connect
from holdfast.node.config import NodeConfig
from holdfast.node.connecting import Opening
from holdfast.node.state import NodeState
from holdfast.session.connection import CLOSED, OPEN, OPENING, Connection

CLIENT = "c"


class AskedHomes(Homes):
    """Notes what it is asked and told."""

    def __init__(self, state: NodeState, fabric: Fabric, images: Images) -> None:
        super().__init__(state, fabric, images)
        self.asked: list[int] = []
        self.told_closed: list[int] = []

    def open(self, node: str, fields: dict[str, object]) -> None:
        number = fields["request"]
        assert isinstance(number, int)
        self.asked.append(number)

    def closed(self, node: str, client_id: str, epoch: int) -> None:
        self.told_closed.append(epoch)


class LedHere(Fabric):
    def leader(self, partition: int) -> str:
        return self.node_id


class Bench:
    def __init__(self) -> None:
        journal = Journal(1, replicated=True)
        config = NodeConfig(partitions=1)
        self.state = NodeState(config, journal)
        fabric = LedHere("n1", journal)
        fabric.has_majority = True
        self.homes = AskedHomes(self.state, fabric, Images(NodeState(config, journal)))
        self.opener = Opener(self.state, fabric, self.homes)

    def connect(self) -> Connection:
        connection = Connection(1 << 20, "", "")
        connection.version = 5
        connection.client_id = CLIENT
        connection.state = OPENING
        packet = Connect(5, False, 60, CLIENT)
        connection.connect = packet
        self.opener.open_session(connection, CLIENT, Opening(packet, 3600, {}))
        return connection

    def answer(self, number: int, epoch: int) -> None:
        self.opener.opened(
            {
                "request": number,
                "client": CLIENT,
                "epoch": epoch,
                "present": False,
                "lost": False,
                "session": None,
            }
        )

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
