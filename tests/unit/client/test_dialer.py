"""The back-off and the race for a connection, without sockets and clock."""

from itertools import pairwise
from random import Random

import pytest

from holdfast.client.errors import (
    AuthenticationFailed,
    ClientError,
    ConnectionLost,
    ConnectionRefused,
    ProtocolError,
    SubscribeRefused,
    TimedOut,
)
from holdfast.client.reconnect import ONCE, Backoff, Reconnect, is_transient
from holdfast.client.servers import Server
from holdfast.client.transport.dialer import STRAY_S, Action, Dialer, Drop, GiveUp, Open, Start
from holdfast.protocol.mqtt import reasons

A, B, C = (Server("mqtt", name, 1883) for name in "abc")
REFUSED = ConnectionLost("connection refused")
LOST = ConnectionLost("connection lost")
SILENT = ConnectionLost("the server does not answer", reasons.KEEP_ALIVE_TIMEOUT)
BUSY = ConnectionRefused("busy", reasons.SERVER_BUSY)


class Wire:
    """Drives a dialer whose servers do what `behaves` says, and keeps the log of its actions.

    A behaviour is an error (the attempt fails at once), "open" (accepts and answers CONNECT),
    "mute" (accepts, does not answer) or "hole" (does not even accept)."""

    def __init__(
        self,
        behaves: dict[Server, ClientError | str],
        policy: Reconnect | None = None,
        random: float = 0.0,
    ) -> None:
        self.behaves = behaves
        self.now = 100.0
        self.log: list[tuple[float, Action]] = []
        self.gave_up: ClientError | None = None
        self.dialer = Dialer(list(behaves), policy or Reconnect(), 30.0, lambda: random)

    def begin(self) -> "Wire":
        self.dialer.start(self.now)
        self._carry_out()
        return self

    def lose(self, error: ClientError) -> "Wire":
        self.dialer.note_lost(error, self.now)
        self._carry_out()
        return self

    def run(self, seconds: float) -> "Wire":
        """Let the time pass, until there is a connection or none is coming."""
        end = self.now + seconds
        while self.dialer.server is None and self.gave_up is None:
            when = self.dialer.timer()
            if when is None or when > end:
                self.now = end
                break
            assert when >= self.now
            self.now = max(when, self.now)
            self.dialer.handle_timer(self.now)
            self._carry_out()
        return self

    def _carry_out(self) -> None:
        while actions := self.dialer.actions():
            for action in actions:
                self.log.append((round(self.now - 100, 6), action))
                match action:
                    case Open(server):
                        behaviour = self.behaves[server]
                        if isinstance(behaviour, ClientError) and behaviour is not BUSY:
                            self.dialer.failed(server, behaviour, self.now)
                        elif behaviour != "hole":
                            self.dialer.opened(server, self.now)
                    case Start(server):
                        if self.behaves[server] == "open":
                            self.dialer.connected(server, self.now)
                        elif self.behaves[server] is BUSY:
                            self.dialer.failed(server, BUSY, self.now)
                    case GiveUp(error):
                        self.gave_up = error

    def opened(self, server: Server) -> list[float]:
        return [when for when, action in self.log if action == Open(server)]


def test_delays_grow_to_the_longest_and_are_shortened_by_up_to_a_half() -> None:
    policy = Reconnect(first_delay_s=0.02, delay_max_s=0.1, multiplier=2)
    longest = Backoff(lambda: 0.0)
    assert [longest.next_s(policy) for _ in range(5)] == [0.02, 0.04, 0.08, 0.1, 0.1]
    longest.reset()
    assert longest.next_s(policy) == 0.02
    random = Random(1)
    shortened = Backoff(random.random)
    for bound_s in (0.02, 0.04, 0.08, 0.1, 0.1):
        assert bound_s / 2 < shortened.next_s(policy) <= bound_s


def test_two_clients_do_not_come_back_in_step() -> None:
    one, other = (
        [Backoff(Random(seed).random).next_s(Reconnect()) for _ in range(3)] for seed in (1, 2)
    )
    assert set(one).isdisjoint(other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_delay_s": 0},
        {"first_delay_s": 6},
        {"multiplier": 0.9},
        {"attempts_max": 0},
        {"give_up_after_s": 0},
        {"stagger_s": 0},
        {"connack_timeout_s": -1},
        {"stable_after_s": -1},
    ],
    ids=str,
)
def test_impossible_policies(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Reconnect(**wrong)  # type: ignore[arg-type]


def test_which_failures_are_tried_again() -> None:
    for reason in (
        *(-1, reasons.SERVER_UNAVAILABLE, reasons.SERVER_BUSY, reasons.QUOTA_EXCEEDED),
        *(reasons.USE_ANOTHER_SERVER, reasons.SERVER_MOVED, reasons.SERVER_SHUTTING_DOWN),
    ):
        assert is_transient(ConnectionLost("", reason))
        assert is_transient(ConnectionRefused("", reason))
    assert is_transient(TimedOut(""))
    for reason in (
        *(reasons.BAD_USER_NAME_OR_PASSWORD, reasons.NOT_AUTHORIZED, reasons.BANNED),
        *(reasons.CLIENT_IDENTIFIER_NOT_VALID, reasons.UNSUPPORTED_PROTOCOL_VERSION),
        *(reasons.SESSION_TAKEN_OVER, reasons.PACKET_TOO_LARGE, reasons.PROTOCOL_ERROR),
    ):
        assert not is_transient(ConnectionLost("", reason))
        assert not is_transient(ConnectionRefused("", reason))
    assert not is_transient(ProtocolError("", reasons.PROTOCOL_ERROR))
    assert not is_transient(AuthenticationFailed(""))
    # MQTT 3 has no other code for "you may not".
    assert not is_transient(SubscribeRefused("", reasons.UNSPECIFIED_ERROR, "", []))
    assert is_transient(SubscribeRefused("", reasons.QUOTA_EXCEEDED, "", []))


def test_the_first_that_answers_is_taken_and_the_others_are_not_asked() -> None:
    wire = Wire({A: "open", B: "open"}).begin().run(10)
    assert wire.dialer.server == A
    assert wire.log == [(0, Open(A)), (0, Start(A))]


def test_a_refused_server_costs_its_refusal() -> None:
    wire = Wire({A: REFUSED, B: BUSY, C: "open"}).begin().run(10)
    assert wire.dialer.server == C
    assert [when for when, _ in wire.log] == [0] * len(wire.log)


def test_a_server_that_swallows_packets_costs_the_stagger() -> None:
    wire = Wire({A: "hole", B: "open"}).begin().run(10)
    assert wire.dialer.server == B
    assert wire.opened(B) == [0.25]
    assert wire.log[-1] == (0.25, Drop(A))


def test_a_stopped_server_is_left_for_one_that_accepts_and_only_then() -> None:
    wire = Wire({A: "mute", B: "open"}).begin().run(10)
    assert wire.dialer.server == B
    # B is open by 0.25 s, but there is one CONNECT at a time: A's first half second passes.
    assert wire.log == [
        *[(0, Open(A)), (0, Start(A)), (0.25, Open(B))],
        *[(0.5, Drop(A)), (0.5, Start(B))],
    ]
    wire = Wire({A: "mute", B: REFUSED}).begin().run(10)
    assert Drop(A) not in [action for _, action in wire.log]
    assert len(wire.opened(B)) > 5
    wire.behaves[B] = "open"
    wire.run(10)
    assert wire.dialer.server == B


def test_slow_servers_get_more_time_each_turn() -> None:
    wire = Wire({A: "mute", B: "mute"}).begin().run(60)
    starts = [when for when, action in wire.log if isinstance(action, Start)]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps[:5] == pytest.approx([0.5, 1, 2, 4, 8])
    asked = [action.server for _, action in wire.log if isinstance(action, Start)]
    assert asked[:4] == [A, B, A, B]


def test_rounds_follow_the_back_off_and_each_starts_where_it_worked_last() -> None:
    policy = Reconnect(first_delay_s=0.1, delay_max_s=1.0, multiplier=2)
    wire = Wire({A: REFUSED, B: "open", C: REFUSED}, policy).begin().run(1)
    assert wire.dialer.server == B
    wire.behaves[B] = REFUSED
    wire.now = 200.0
    wire.log.clear()
    wire.lose(LOST).run(5)
    times = [100 + one for one in (0.1, 0.3, 0.7, 1.5, 2.5, 3.5, 4.5)]
    for server in (A, B, C):
        assert wire.opened(server) == pytest.approx(times)
    opened = [action.server for _, action in wire.log if isinstance(action, Open)]
    assert opened[:6] == [B, C, A, B, C, A]


def test_a_silent_server_comes_last() -> None:
    wire = Wire({A: "open", B: "open"}).begin().run(1)
    wire.behaves[A] = "mute"
    wire.now += 60
    wire.log.clear()
    wire.lose(SILENT).run(1)
    assert wire.dialer.server == B
    assert [action for _, action in wire.log] == [Open(B), Start(B)]


def test_a_server_that_accepts_and_drops_is_not_asked_in_a_tight_loop() -> None:
    policy = Reconnect(first_delay_s=0.1, delay_max_s=1.0, multiplier=2, stable_after_s=5)
    wire = Wire({A: "open"}, policy).begin().run(1)
    gaps = []
    for _ in range(5):
        lost_at = wire.now
        wire.lose(LOST).run(10)
        assert wire.dialer.server == A
        gaps.append(wire.now - lost_at)
    assert gaps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])
    wire.now += 5
    lost_at = wire.now
    wire.lose(LOST).run(10)
    assert wire.now - lost_at == pytest.approx(0.1)


def test_one_round_only() -> None:
    wire = Wire({A: REFUSED}, ONCE).begin()
    assert wire.gave_up is REFUSED
    wire = Wire({A: REFUSED, B: BUSY}, ONCE).begin()
    assert isinstance(wire.gave_up, ConnectionLost)
    assert str(wire.gave_up) == (
        "no server could be reached; a:1883: connection refused; b:1883: busy"
    )
    wire = Wire({A: "hole", B: REFUSED}, ONCE).begin().run(10)
    assert wire.gave_up is None
    wire.dialer.failed(A, TimedOut("a:1883: no connection in 30 s"), wire.now)
    wire._carry_out()
    assert "no connection in 30 s" in str(wire.gave_up)
    assert wire.dialer.timer() is None


def test_attempts_are_counted_from_the_last_connection() -> None:
    wire = Wire({A: REFUSED, B: REFUSED}, Reconnect(attempts_max=3)).begin().run(60)
    assert len(wire.opened(A)) == len(wire.opened(B)) == 3
    assert wire.gave_up is not None
    wire = Wire({A: "open"}, Reconnect(attempts_max=2, stable_after_s=100)).begin().run(1)
    for _ in range(5):
        wire.lose(LOST).run(60)
        assert wire.dialer.server == A
    wire.behaves[A] = REFUSED
    wire.log.clear()
    wire.lose(LOST).run(60)
    assert len(wire.opened(A)) == 2
    assert wire.gave_up is not None


def test_giving_up_after_a_time() -> None:
    refused = ConnectionLost("a:1883: refused")
    refused.__cause__ = OSError(111, "refused")
    wire = Wire({A: refused, B: "hole"}, Reconnect(give_up_after_s=2)).begin().run(60)
    assert wire.now == pytest.approx(102)
    assert str(wire.gave_up) == "no connection in 2 s; a:1883: refused"
    assert isinstance(wire.gave_up, ConnectionLost)
    assert wire.gave_up.__cause__ is refused.__cause__
    assert wire.log[-2][1] == Drop(B)
    assert wire.dialer.timer() is None
    wire.dialer.handle_timer(wire.now + 100)
    assert wire.dialer.actions() == []


def test_the_first_connection_may_have_a_policy_of_its_own() -> None:
    dialer = Dialer([A], Reconnect(), 30.0, lambda: 0.0)
    dialer.start(0.0, ONCE)
    assert dialer.actions() == [Open(A)]
    dialer.failed(A, REFUSED, 0.0)
    assert dialer.actions() == [GiveUp(REFUSED)]
    dialer.start(1.0, ONCE)
    dialer.opened(A, 1.0)
    dialer.connected(A, 1.0)
    dialer.actions()
    dialer.note_lost(LOST, 2.0)
    assert dialer.actions() == []
    dialer.handle_timer(3.0)
    dialer.failed(A, REFUSED, 3.0)
    assert dialer.actions() == [Open(A)]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefused("no", reasons.NOT_AUTHORIZED),
        ProtocolError("no", reasons.MALFORMED_PACKET),
        AuthenticationFailed("no"),
    ],
    ids=str,
)
def test_what_trying_again_cannot_mend_ends_it_at_once(error: ClientError) -> None:
    wire = Wire({A: "hole", B: error}).begin().run(60)
    assert wire.gave_up is error
    assert (0.25, Drop(A)) in wire.log
    wire = Wire({A: "open"}).begin().run(1).lose(error).run(60)
    assert wire.gave_up is error


def test_another_clients_take_over_ends_it_our_own_does_not() -> None:
    taken = ConnectionLost("taken", reasons.SESSION_TAKEN_OVER)
    wire = Wire({A: "open"}).begin().run(1).lose(taken).run(60)
    assert wire.gave_up is taken
    # A's CONNECT may arrive yet, when B has accepted us: that is not another client.
    wire = Wire({A: "mute", B: "open"}).begin().run(1).lose(taken).run(60)
    assert wire.gave_up is None
    assert wire.dialer.server == B
    # It arrives once.
    assert wire.lose(taken).run(60).gave_up is taken


def test_our_own_take_over_may_come_late_but_not_for_ever() -> None:
    taken = ConnectionLost("taken", reasons.SESSION_TAKEN_OVER)
    for later, gives_up in ((STRAY_S - 5, False), (STRAY_S + 5, True)):
        wire = Wire({A: "mute", B: "open"}).begin().run(1)
        wire.now += later
        assert (wire.lose(taken).run(60).gave_up is taken) == gives_up


def refers(text: str, reason: int = reasons.USE_ANOTHER_SERVER) -> ConnectionLost:
    return ConnectionLost("moved", reason, "", text)


def test_references_go_first_and_are_kept_as_candidates() -> None:
    other = Server("mqtt", "other", 7)
    wire = Wire({A: "open", B: "open"}).begin().run(1)
    wire.behaves[other] = "open"
    wire.log.clear()
    wire.lose(refers("other:7")).run(1)
    assert wire.dialer.server == other
    assert [action for _, action in wire.log] == [Open(other), Start(other)]
    # One of the list is taken as it is.
    wire.lose(refers("b:1883")).run(1)
    assert wire.dialer.server == B
    wire.behaves[A] = wire.behaves[B] = REFUSED
    wire.lose(LOST).run(1)
    assert wire.dialer.server == other


def test_references_that_lead_nowhere_or_back_do_not_spin() -> None:
    wire = Wire({A: BUSY, B: BUSY}, Reconnect(first_delay_s=1, delay_max_s=1)).begin()
    wire.behaves[Server("mqtt", "gone", 1883)] = REFUSED
    wire.run(10)
    for _ in range(3):
        wire.behaves[A] = ConnectionRefused("", reasons.SERVER_MOVED, "", "a:1883 b:1883 gone")
        wire.behaves[B] = ConnectionRefused("", reasons.SERVER_MOVED, "", "gone a:1883")
    wire.log.clear()
    wire.run(10)
    assert len(wire.opened(A)) == pytest.approx(10, abs=1)
    assert len(wire.opened(B)) == pytest.approx(10, abs=1)


def test_references_are_bounded_and_can_be_switched_off() -> None:
    wire = Wire({A: "open"}).begin().run(1)
    for number in range(50):
        name = Server("mqtt", f"s{number}", 1883)
        wire.behaves[name] = "open"
        wire.lose(refers(f"s{number}")).run(100)
        assert wire.dialer.server == name
    assert len(wire.dialer._all_servers()) == 1 + 8
    wire = Wire({A: "open", B: "open"}, Reconnect(follow_references=False)).begin().run(1)
    wire.lose(refers("stranger b:1883")).run(1)
    assert wire.dialer.server == B


def test_nothing_happens_after_stop() -> None:
    wire = Wire({A: "mute", B: "hole"}).begin().run(0.3)
    wire.dialer.stop()
    assert set(wire.dialer.actions()) == {Drop(A), Drop(B)}
    assert wire.dialer.timer() is None
    wire.begin().run(0.4)
    assert wire.opened(A) == [0, 0.3]


def test_random_worlds() -> None:
    """Whatever the servers do: one CONNECT at a time, no attempt opened twice, rounds no closer
    than the back-off allows, and a server that answers is found."""
    for seed in range(300):
        random = Random(seed)
        servers = [A, B, C][: random.randint(1, 3)]
        behaviours: list[ClientError | str] = [REFUSED, BUSY, "open", "mute", "hole"]
        policy = Reconnect(first_delay_s=0.02, delay_max_s=0.5, stable_after_s=1)
        dialer = Dialer(servers, policy, 5.0, random.random)
        now = 0.0
        alive: dict[Server, bool] = {}
        asked: Server | None = None
        opens = 0
        dialer.start(now)
        for step in range(400):
            for action in dialer.actions():
                match action:
                    case Open(server):
                        assert server not in alive
                        alive[server] = False
                        opens += 1
                    case Start(server):
                        assert asked is None
                        assert alive[server]
                        asked = server
                    case Drop(server):
                        del alive[server]
                        asked = None if asked == server else asked
                    case GiveUp():
                        raise AssertionError(f"seed {seed}: gave up")
            if dialer.server is not None:
                assert not alive
                dialer.note_lost(random.choice([LOST, SILENT]), now)
                continue
            if alive and random.random() < 0.6:
                server = random.choice(list(alive))
                behaviour = "open" if step > 390 else random.choice(behaviours)
                if behaviour == "open" and asked == server:
                    asked = None
                    del alive[server]
                    dialer.connected(server, now)
                elif isinstance(behaviour, ClientError):
                    del alive[server]
                    asked = None if asked == server else asked
                    dialer.failed(server, behaviour, now)
                elif behaviour != "hole" and not alive[server]:
                    alive[server] = True
                    dialer.opened(server, now)
            else:
                when = dialer.timer()
                if when is None:
                    assert len(alive) == len(servers), f"seed {seed}: nothing goes on"
                    continue
                now = max(now, when)
                dialer.handle_timer(now)
        assert opens > 0
