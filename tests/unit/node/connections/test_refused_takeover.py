"""A client that is refused takes nothing over, however long its proof takes."""

from collections.abc import Callable

import pytest

from holdfast.node.connections.reauthorize import Reauthorization, UserDeparture
from holdfast.node.effects import AskRights, AskSources, CheckPassword
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from holdfast.security.enhanced_authentication import ScramAuthenticator
from holdfast.security.identity.identity import LoginRefusal
from holdfast.security.scram import ScramClient
from holdfast.security.scram_file import make_credentials
from tests.support.node_bench import NodeBench, Peer

METHOD = "SCRAM-SHA-256"
FORBIDDEN = LoginRefusal(reasons.NOT_AUTHORIZED, "the token has expired")
UNREACHABLE = LoginRefusal(reasons.SERVER_UNAVAILABLE, "the key set cannot be read")


class WaitingBench(NodeBench):
    """A bench whose checks of clients wait for the test."""

    def __init__(self) -> None:
        self.checks: list[AskRights | AskSources | CheckPassword] = []
        super().__init__()

    def _carry_out(self, effect: object) -> None:
        if isinstance(effect, AskRights | AskSources | CheckPassword):
            self.checks.append(effect)
        else:
            super()._carry_out(effect)


def wrong_password(bench: WaitingBench) -> None:
    """Argon2 in a thread."""
    bench.node.state.admission.checks_passwords = True


def source(bench: WaitingBench) -> None:
    """A token with its key set, or an HTTP service."""
    bench.node.state.admission.asks_sources = True


def hooks(bench: WaitingBench) -> None:
    bench.node.state.admission.asks_rights = True


def refuse(bench: WaitingBench, answer: LoginRefusal) -> None:
    (check,) = bench.checks
    if isinstance(check, CheckPassword):
        bench.node.handle_password_checked(check.connection, False)
    else:
        bench.node.handle_answer(check.connection, answer)
    bench.run()


def login(bench: NodeBench, method: str = "", data: bytes = b"") -> Peer:
    peer = bench.peer()
    fields: dict[int, object] = {17: 1000}
    if method:
        fields |= {21: method, 22: data}
    peer.send(m.Connect(5, False, 0, "c", None, "user", b"wrong", fields))  # type: ignore[arg-type]
    return peer


def assert_refused(live: Peer, later: Peer) -> None:
    (connack,) = later.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert connack.reason >= 0x80
    assert later.closed
    assert_untouched(live)


def assert_untouched(live: Peer) -> None:
    assert not live.closed
    assert live.bench.node.state.stats.sessions_taken_over == 0
    live.send(m.Pingreq())
    assert len(live.take(m.Pingresp)) == 1


@pytest.mark.parametrize("answer", [FORBIDDEN, UNREACHABLE])
@pytest.mark.parametrize("way", [wrong_password, source, hooks])
def test_by_a_check_that_waits(way: Callable[[WaitingBench], None], answer: LoginRefusal) -> None:
    bench = WaitingBench()
    live = bench.connect("c", expiry_s=1000)
    way(bench)
    later = login(bench)
    assert later.take() == []
    assert_untouched(live)
    refuse(bench, answer)
    assert_refused(live, later)


def test_a_user_who_is_disabled_while_a_client_is_checked() -> None:
    """Its session may be at another node, so it is in no table here yet."""
    bench = WaitingBench()
    live = bench.connect("c", expiry_s=1000)
    hooks(bench)
    later = login(bench)
    later.connection.username = "user"
    state = bench.node.state
    done: list[bool] = []
    state.start_work(UserDeparture(state, frozenset({"user"}), lambda: done.append(True)))
    bench.advance(0.1)
    assert done == [True]
    assert_refused(live, later)
    (check,) = bench.checks
    assert isinstance(check, AskRights)
    bench.node.handle_rights(check, None)
    bench.run()
    assert_untouched(live)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_user_who_is_removed_while_hooks_decide_about_rights(is_known: bool) -> None:
    """The password was right, and the reload comes before CONNACK. A password that is still being
    checked counts by the present file."""
    bench = WaitingBench()
    live = bench.connect("c", expiry_s=1000)
    wrong_password(bench)
    hooks(bench)
    later = login(bench)
    state = bench.node.state
    counts: list[int] = []
    for is_proved in (False, True):
        if is_proved:
            bench.node.handle_password_checked(bench.checks.pop().connection, True)
            bench.run()
            assert isinstance(bench.checks[0], AskRights)
        state.start_work(Reauthorization(state, lambda name, _: is_known, counts.append))
        bench.run()
        if is_known or not is_proved:
            assert later.take() == []
    assert counts == [0, int(not is_known)]
    if not is_known:
        assert_refused(live, later)


def test_by_an_exchange() -> None:
    bench = NodeBench()
    live = bench.connect("c", expiry_s=1000)
    credentials = make_credentials("right", salt=b"salt")
    bench.node.state.admission.authenticators[METHOD] = lambda: ScramAuthenticator(
        lambda user: credentials
    )
    client = ScramClient("sam", "wrong")
    later = login(bench, METHOD, client.first())
    (challenge,) = later.take(m.Auth)
    assert isinstance(challenge, m.Auth)
    assert_untouched(live)
    data = challenge.properties[22]
    assert isinstance(data, bytes)
    bench.notes.clear()
    later.send(m.Auth(reasons.CONTINUE_AUTHENTICATION, {21: METHOD, 22: client.final(data)}))
    (line,) = [each for each in bench.notes if each.event == "connection_refused"]
    assert line.fields["user"] == "sam"
    assert_refused(live, later)
