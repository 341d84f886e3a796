"""Rates, quotas, bans and lock-outs on a node without sockets: reason codes, waits, bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.listener import Listener
from holdfast.config.schema import Config, Rates, ScopeRates
from holdfast.io.settings.node_settings import admission_limits
from holdfast.log.record import BAN, Record
from holdfast.node.admission import lockouts
from holdfast.node.admission.bans import BadBanName, Ban, BanTable, ban_address
from holdfast.node.admission.checks import connect_refusal
from holdfast.node.admission.limits import AdmissionLimits, RateLimits
from holdfast.node.admission.lockouts import FailureCount, LockedName, LockoutTable
from holdfast.node.admission.meters import MeterTable, bounded_name, names_of
from holdfast.node.admission.throttle import replace_limits
from holdfast.node.admission.token_bucket import TokenBucket
from holdfast.node.config import NodeConfig
from holdfast.node.connections.reauthorize import Reauthorization
from holdfast.node.effects import CheckPassword
from holdfast.node.session.connection import Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.node.state.ban_records import present_bans, record_ban, record_lift
from holdfast.node.state.recovery import Recovery
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.encode import encode
from holdfast.security.acl import given_rules
from holdfast.security.enhanced_authentication import Failure, Success
from holdfast.security.identity.identity import ClientIdentity
from tests.support.node_bench import NodeBench, Peer

STEPS = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0.1, 40)), min_size=1, max_size=200
)  # (seconds passed, amount wanted)


@given(per_s=st.floats(0.01, 1000), burst=st.floats(0.5, 1000), steps=STEPS)
def test_a_bucket_gives_no_more_than_its_rate(
    per_s: float, burst: float, steps: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(per_s, burst, 0.0)
    now = taken = largest = 0.0
    for passed_s, amount in steps:
        now += passed_s
        if not bucket.is_empty(now):
            bucket.take(amount)
            taken += amount
            largest = max(largest, amount)
        allowed = burst + per_s * now + largest
        assert taken <= allowed * (1 + 1e-6) + 1e-6
    wait_s = bucket.wait_s()
    assert not bucket.is_empty(now + wait_s + 1e-6)


@given(per_s=st.floats(0.5, 100), amounts=st.lists(st.floats(1, 5), min_size=1, max_size=50))
def test_one_that_waits_gets_its_rate(per_s: float, amounts: list[float]) -> None:
    bucket = TokenBucket(per_s, max(1.0, per_s), 0.0)
    now = 0.0
    for amount in amounts:
        bucket.refill(now)
        now += bucket.wait_s()
        assert not bucket.is_empty(now + 1e-6)
        bucket.take(amount)
    assert now <= sum(amounts) / per_s + 1.0


def limits(**values: object) -> AdmissionLimits:
    return AdmissionLimits(**values)  # type: ignore[arg-type]


def bench(admission: AdmissionLimits, **config: object) -> NodeBench:
    settings = NodeConfig(partitions=4, sys_interval_s=0, admission=admission, **config)  # type: ignore[arg-type]
    return NodeBench(settings)


def publication(number: int, qos: int, payload: bytes = b"") -> m.Publish:
    return m.Publish(b"t", payload, qos, False, False, number if qos else 0, b"", 0, -1)


def login(node: NodeBench, user: str, client_id: str, password: bytes = b"right") -> Peer:
    peer = node.peer()
    peer.send(m.Connect(5, True, 0, client_id, None, user, password, {}))
    return peer


def reason(peer: Peer) -> int:
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    return connack.reason


def acks(peer: Peer, qos: int = 1) -> list[int]:
    """The reasons, with 0 for every acceptance."""
    return [
        each.reason * (each.reason >= 0x80)
        for each in peer.take(m.Ack)
        if isinstance(each, m.Ack) and each.kind == (m.PUBACK if qos == 1 else m.PUBREC)
    ]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_above_the_rate_is_refused(qos: int) -> None:
    node = bench(limits(client=RateLimits(messages_per_s=3)))
    peer = node.connect("c")
    peer.send(*(publication(number, qos) for number in range(1, 6)))
    assert acks(peer, qos) == [0, 0, 0, reasons.QUOTA_EXCEEDED, reasons.QUOTA_EXCEEDED]
    assert node.node.state.stats.refused_rate == 2
    node.advance(1.0)
    peer.send(publication(9, qos))
    assert acks(peer, qos) == [0]
    assert not peer.closed


def test_a_repeated_qos_2_message_is_never_refused() -> None:
    """It was stored: a client that is told otherwise would publish it again."""
    node = bench(limits(client=RateLimits(messages_per_s=1)))
    peer = node.connect("c")
    again = m.Publish(b"t", b"", 2, False, True, 1, b"", 0, -1)
    peer.send(publication(1, 2), again)
    assert acks(peer, 2) == [0, 0]


@pytest.mark.parametrize(("version", "qos"), [(5, 0), (4, 0), (4, 1), (3, 1)])
def test_where_mqtt_has_no_refusal_the_client_waits(version: int, qos: int) -> None:
    node = bench(limits(client=RateLimits(messages_per_s=2)))
    receiver = node.connect("r")
    receiver.send(m.Subscribe(1, [m.SubscriptionRequest("t", 0)]))
    peer = node.connect("c", version)
    peer.send(*(publication(number, qos) for number in range(1, 8)))
    assert len(receiver.publishes()) == 2
    assert peer.connection.input_paused
    arrived = 2
    for _ in range(40):
        node.advance(0.25)
        arrived += len(receiver.publishes())
        assert arrived <= 2 + 2 * (node.now - 1000.0) + 1
        if arrived == 7:
            break
    assert arrived == 7
    assert not peer.closed
    assert node.now - 1000.0 == pytest.approx(2.5, abs=0.5)


def test_other_clients_do_not_wait() -> None:
    node = bench(limits(client=RateLimits(messages_per_s=2)))
    loud, quiet = node.connect("loud", 4), node.connect("quiet", 4)
    loud.send(*(publication(number, 1) for number in range(1, 100)))
    quiet.send(publication(1, 1))
    assert acks(quiet) == [0]
    assert not quiet.connection.input_paused


def test_a_wait_is_no_silence() -> None:
    node = bench(limits(client=RateLimits(bytes_per_s=10)))
    peer = node.connect("c", 4, keep_alive_s=10)
    peer.send(publication(1, 1, bytes(1000)), m.Pingreq())
    for _ in range(9):
        node.advance(10.0)
        assert not peer.closed
    node.advance(12.0)
    assert peer.take(m.Pingresp)
    node.advance(16.0)
    assert peer.closed


def test_disconnect_above_the_rate() -> None:
    node = bench(limits(client=RateLimits(messages_per_s=1), over="disconnect"))
    peer = node.connect("c")
    peer.send(publication(1, 1), publication(2, 1))
    (left,) = peer.take(m.Disconnect)
    assert isinstance(left, m.Disconnect)
    assert left.reason == reasons.MESSAGE_RATE_TOO_HIGH
    assert peer.closed


def test_connecting_again_gives_no_new_allowance() -> None:
    node = bench(limits(client=RateLimits(messages_per_s=2)))
    for expected in ([0, 0], [reasons.QUOTA_EXCEEDED] * 2):
        peer = node.connect("c")
        peer.send(publication(1, 1), publication(2, 1))
        assert acks(peer) == expected
        peer.lose()


def test_the_connections_of_a_user_share_an_allowance() -> None:
    node = bench(limits(user=RateLimits(messages_per_s=2)))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    one, two = login(node, "u", "one"), login(node, "u", "two")
    one.send(publication(1, 1), publication(2, 1))
    two.send(publication(1, 1))
    assert acks(one) == [0, 0]
    assert acks(two) == [reasons.QUOTA_EXCEEDED]


def test_a_topic_alias_counts_in_a_message_that_is_dropped() -> None:
    node = bench(limits(bytes_per_user=1, period_s=10.0))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    peer = login(node, "u", "c")
    peer.send(publication(1, 1))
    peer.send(m.Publish(b"t", b"dropped", 0, False, False, 0, b"", 7, -1))
    node.advance(30.0)
    peer.send(m.Publish(b"", b"passes", 0, False, False, 0, b"", 7, -1))
    assert not peer.closed


def test_a_used_quota_of_bytes_comes_back_evenly() -> None:
    node = bench(limits(bytes_per_user=1000, period_s=100.0))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    peer = login(node, "u", "c")
    peer.send(publication(1, 1, bytes(1000)), publication(2, 1))
    assert acks(peer) == [0, reasons.QUOTA_EXCEEDED]
    assert node.node.state.stats.refused_quota == 1
    node.advance(10.0)
    peer.send(publication(3, 1, bytes(50)))
    assert acks(peer) == [0]


def test_clients_without_a_user_share_the_quota_of_their_address() -> None:
    """Anonymous access fills no disk, however many client ids it uses."""
    node = bench(limits(bytes_per_user=1000, period_s=100.0))

    def publishes(address: str, client_id: str) -> bool:
        peer = Peer(node, 5, address=address)
        peer.send(m.Connect(5, True, 0, client_id, None, None, None, {}))
        peer.take(m.Connack)
        peer.send(publication(1, 1, bytes(1000)))
        return acks(peer) == [0]

    assert publishes("192.0.2.1", "a")
    assert not publishes("192.0.2.1", "b")
    assert publishes("192.0.2.2", "c")


@pytest.mark.parametrize("scope", ["client", "address", "listener", "user"])
def test_a_connect_above_the_rate_is_refused(scope: str) -> None:
    node = bench(limits(**{scope: RateLimits(connects_per_s=2)}))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    found = [reason(login(node, "u", "c")) for _ in range(4)]
    assert found == [0, 0, reasons.CONNECTION_RATE_EXCEEDED, reasons.CONNECTION_RATE_EXCEEDED]
    stats = node.node.state.stats
    assert stats.refused_connect_rate == stats.connections_refused == 2
    assert stats.connection_refusals == {"Connection rate exceeded": 2}
    node.advance(0.6)
    assert reason(login(node, "u", "c")) == 0


def test_an_address_above_its_rate_uses_up_no_rate_of_the_listener() -> None:
    node = bench(
        limits(address=RateLimits(connects_per_s=2), listener=RateLimits(connects_per_s=5))
    )

    def connects(address: str) -> bool:
        connection = Connection(1000, f"{address}:1", ListenerRules("l"))
        return connect_refusal(node.node.state, connection, "", None) is None

    assert [connects("10.0.0.1") for _ in range(20)] == [True, True] + [False] * 18
    assert connects("10.0.0.2")
    assert connects("10.0.0.2")
    # The fifth is the listener's last.
    assert connects("10.0.0.3")
    assert not connects("10.0.0.4")


@pytest.mark.parametrize("scope", ["client", "user"])
def test_strangers_use_up_no_rate_of_a_name(scope: str) -> None:
    node = bench(limits(**{scope: RateLimits(connects_per_s=2)}))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    wrong = reasons.BAD_USER_NAME_OR_PASSWORD
    assert [reason(login(node, "u", "c", b"wrong")) for _ in range(9)] == [wrong] * 9
    found = [reason(login(node, "u", "c")) for _ in range(3)]
    assert found == [0, 0, reasons.CONNECTION_RATE_EXCEEDED]


def test_a_listener_may_have_rates_of_its_own() -> None:
    """Its clients share them, and those of other listeners have the common ones."""
    own = {"slow": RateLimits(messages_per_s=1, connects_per_s=3)}
    node = bench(limits(listener=RateLimits(messages_per_s=3), listeners=own))
    peers = [node.peer(5, ListenerRules(name)) for name in ("slow", "slow", "other", "slow")]
    connects = [m.Connect(5, True, 0, name, None, None, None, {}) for name in "abcd"]
    for peer, packet in zip(peers, connects, strict=True):
        peer.send(packet)
    assert [reason(peer) for peer in peers] == [0, 0, 0, 0]
    late = node.peer(5, ListenerRules("slow"))
    late.send(m.Connect(5, True, 0, "e", None, None, None, {}))
    assert reason(late) == reasons.CONNECTION_RATE_EXCEEDED
    over = reasons.QUOTA_EXCEEDED
    for peer, expected in zip(peers, ([0, over], [over, over], [0, 0], [over, over]), strict=True):
        peer.send(publication(1, 1), publication(2, 1))
        assert acks(peer) == expected
    config = Config(
        listeners=[Listener(port=1), Listener(port=2, bytes_per_s=7.0)],
        rates=Rates(listener=ScopeRates(messages_per_s=5.0)),
    )
    made = admission_limits(config)
    assert made.rates_of("listener", "127.0.0.1:1") == RateLimits(messages_per_s=5.0)
    assert made.rates_of("listener", "127.0.0.1:2") == RateLimits(5.0, 7.0)


def test_a_user_has_so_many_sessions() -> None:
    node = bench(limits(sessions_per_user=2))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords |= {"u": b"right", "v": b"right"}
    assert [reason(login(node, "u", name)) for name in "abc"] == [0, 0, reasons.QUOTA_EXCEEDED]
    # A takeover is no new session; another user has room; an ended session leaves some.
    taken_over = login(node, "u", "a")
    assert reason(taken_over) == 0
    assert reason(login(node, "v", "d")) == 0
    taken_over.lose()
    assert reason(login(node, "u", "c")) == 0


def test_kept_sessions_count_after_a_restart() -> None:
    node = bench(limits(sessions_per_user=1), authenticates_users=True)
    peer = node.peer()
    peer.connection.certificate_name = "u"
    peer.send(m.Connect(5, True, 0, "a", None, None, None, {17: 1000}))
    node.settle()
    node.crash()
    peer = node.peer()
    peer.connection.certificate_name = "u"
    peer.send(m.Connect(5, True, 0, "b", None, None, None, {17: 1000}))
    assert reason(peer) == reasons.QUOTA_EXCEEDED


def test_a_session_without_a_client_counts_until_it_ends() -> None:
    """A user who connects and leaves with ever new client ids has no more than the quota."""
    node = bench(limits(sessions_per_user=2), authenticates_users=True)

    def certified(name: str, expiry_s: int) -> Peer:
        peer = node.peer()
        peer.connection.certificate_name = "u"
        packet = m.Connect(5, False, 0, name, None, None, None, {17: expiry_s})
        peer.send(packet)
        return peer

    for name, expected in (("a", 0), ("b", 0), ("c", reasons.QUOTA_EXCEEDED), ("a", 0)):
        peer = certified(name, 1000)
        assert reason(peer) == expected
        peer.lose()
    # It ends with its connection.
    last = certified("a", 0)
    assert reason(last) == 0
    last.lose()
    node.settle()
    assert reason(certified("c", 0)) == 0


def test_failures_lock_an_address_out() -> None:
    node = bench(limits(lockout_failures=3, lockout_s=100.0))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    for _ in range(3):
        assert reason(login(node, "u", "c", b"wrong")) == reasons.BAD_USER_NAME_OR_PASSWORD
    assert reason(login(node, "u", "c")) == reasons.BANNED
    assert not node.node.has_room("test:9", "test", 10)
    assert node.node.has_room("other:9", "test", 10)
    (note,) = [each for each in node.notes if each.event == "locked_out"]
    assert (note.fields["scope"], note.fields["name"]) == ("address", "test")
    node.advance(101.0)
    assert reason(login(node, "u", "c")) == 0


def test_failures_are_counted_within_a_window() -> None:
    node = bench(limits(lockout_failures=2, lockout_window_s=10.0))
    node.node.state.admission.checks_passwords = True
    for _ in range(4):
        assert reason(login(node, "u", "c", b"wrong")) == reasons.BAD_USER_NAME_OR_PASSWORD
        node.advance(11.0)


def ban(node: NodeBench, scope: str, name: str, duration_s: float = 60.0) -> None:
    """Ban a name, and wait for the commit."""
    state = node.node.state
    until_us = state.wall_us + round(duration_s * 1e6) if duration_s else 0
    failures: list[str] = []
    record_ban(state, Ban(scope, name, until_us, "too loud", "user amy", 1), failures.append)
    node.run()
    assert failures == [""]


def lift(node: NodeBench, scope: str, name: str) -> None:
    failures: list[str] = []
    record_lift(node.node.state, scope, name, failures.append)
    node.run()
    assert failures == [""]


def banned_names(node: NodeBench) -> list[str]:
    return [each.name for each in present_bans(node.node.state) if each is not None]


@pytest.mark.parametrize(("scope", "name"), [("client", "c"), ("user", "u"), ("address", "test")])
def test_a_ban_ends_connections_and_is_lifted(scope: str, name: str) -> None:
    node = bench(limits())
    state = node.node.state
    state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    peer, other = login(node, "u", "c"), node.connect("other")
    assert reason(peer) == 0
    ban(node, scope, name)
    (left,) = peer.take(m.Disconnect)
    assert isinstance(left, m.Disconnect)
    assert left.reason == reasons.ADMINISTRATIVE_ACTION
    assert state.stats.refused_banned == (2 if scope == "address" else 1)
    assert other.closed == (scope == "address")
    assert reason(login(node, "u", "c")) == reasons.BANNED
    assert banned_names(node) == [name]
    lift(node, scope, name)
    assert banned_names(node) == []
    assert reason(login(node, "u", "c")) == 0
    ban(node, scope, name, 30.0)
    node.advance(31.0)
    assert reason(login(node, "u", "c")) == 0


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_crash_forgets_no_ban(with_snapshot: bool) -> None:
    node = bench(limits())
    ban(node, "client", "for ever", 0)
    ban(node, "client", "short", 5.0)
    ban(node, "client", "lifted")
    lift(node, "client", "lifted")
    snapshot = node.snapshot() if with_snapshot else None
    offsets = list(node.journal.next_offset) if with_snapshot else None
    ban(node, "user", "late")
    node.crash(snapshot=snapshot, offsets=offsets)
    assert reason(login(node, "late", "c")) == reasons.BANNED
    assert reason(login(node, "u", "short")) == reasons.BANNED
    assert reason(login(node, "u", "lifted")) == 0
    node.advance(6.0)
    assert reason(login(node, "u", "short")) == 0
    node.advance(1e7)
    assert reason(login(node, "u", "for ever")) == reasons.BANNED


def test_a_ban_during_the_check_of_a_password_counts() -> None:
    node = bench(limits(), authenticates_users=True)
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["u"] = b"right"
    peer = node.peer()
    connect = m.Connect(5, True, 0, "c", None, "u", b"right", {})
    node.node.handle_data(peer.connection, encode(connect, 5))
    assert any(isinstance(each, CheckPassword) for each in node.node.state.effects)
    # The bench commits the ban before it carries out the check.
    ban(node, "client", "c")
    assert reason(peer) == reasons.BANNED


def test_a_banned_user_is_found_by_a_proof_other_than_the_name() -> None:
    node = bench(limits(), authenticates_users=True)
    ban(node, "user", "u")
    peer = node.peer()
    peer.connection.certificate_name = "u"
    peer.send(m.Connect(5, True, 0, "c", None, None, None, {}))
    assert reason(peer) == reasons.BANNED


def test_other_limits_apply_to_present_connections() -> None:
    node = bench(limits())
    peer = node.connect("c")
    assert peer.connection.meter is None
    replace_limits(node.node.state, limits(client=RateLimits(messages_per_s=1)))
    node.run()
    peer.send(publication(1, 1), publication(2, 1))
    assert acks(peer) == [0, reasons.QUOTA_EXCEEDED]
    replace_limits(node.node.state, limits())
    node.run()
    peer.send(publication(3, 1))
    assert acks(peer) == [0]
    assert peer.connection.meter is None


def test_full_buckets_are_forgotten_and_all_are_bounded() -> None:
    table = MeterTable(limits(client=RateLimits(messages_per_s=1)), 50)
    for number in range(200):
        meter = table.meter(names_of(f"c{number}", None, "", ""), 0.0)
        assert meter is not None
        meter.charge(1, 1)
        table.release(meter, 0.0)
    assert len(table) == 50
    for number in range(60):
        meter = table.meter(names_of("late", None, "", ""), 100.0 + number)
        assert meter is not None
        table.release(meter, 100.0 + number)
    assert len(table) <= 1


def test_bans_and_failures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockouts, "LOCKOUTS_MAX", 10)
    monkeypatch.setattr(lockouts, "FAILURES_MAX", 10)
    table, failures = LockoutTable(), FailureCount()
    for number in range(50):
        table.add(LockedName("user", f"u{number}", 100.0, "x"))
        failures.add("user", f"u{number}", 60.0, 0.0)
    assert len(table) == 10
    assert len(failures) == 10
    assert table.find("user", "u49", 50.0) is not None
    assert table.find("user", "u49", 100.0) is None
    assert table.get("user", "u49") is None


def test_ended_bans_do_not_gather() -> None:
    table = BanTable()
    for number in range(10_000):
        table.put(Ban("client", f"c{number}", 1000 * number + 50_000), 1000 * number)
    assert len(table) < 100


def test_a_ban_of_a_network_is_of_its_addresses_only() -> None:
    table = BanTable()
    for name in ("10.1.0.0/16", "192.0.2.0/30", "2001:db8::/32", "198.51.100.7"):
        table.put(Ban("address", ban_address(name), 0), 0)
    for name, is_banned in (
        ("10.1.255.255", True),
        ("10.2.0.0", False),
        ("192.0.2.3", True),
        ("192.0.2.4", False),
        ("198.51.100.7", True),
        ("198.51.100.8", False),
        ("2001:db8:ffff::/64", True),
        ("2001:db9::/64", False),
        ("unix", False),
    ):
        assert (table.find("address", name, 0) is not None) == is_banned, name
    assert table.find("client", "10.1.0.1", 0) is None
    table.lift("address", "10.1.0.0/16")
    assert table.find("address", "10.1.0.1", 0) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("192.0.2.7/32", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::/64"),
        ("2001:DB8:0:0::/48", "2001:db8::/48"),
    ],
)
def test_the_name_of_a_banned_address(text: str, name: str) -> None:
    assert ban_address(text) == name


@pytest.mark.parametrize(
    "text", ["", "x", "192.0.2.7/24", "2001:db8::/65", "192.0.2", "1.2.3.4/99"]
)
def test_a_wrong_address_is_not_banned(text: str) -> None:
    with pytest.raises(BadBanName, match=r"like 192\.0\.2\.7|/64"):
        ban_address(text)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_removed_user_leaves_unless_a_source_vouches(is_asked: bool) -> None:
    """Rights from a hook do not prove the name of a client that signed in by password."""
    node = bench(limits(), authenticates_users=True)
    state = node.node.state
    state.admission.checks_passwords = not is_asked
    state.admission.asks_sources = is_asked
    state.admission.asks_rights = True
    node.valid_passwords["u"] = b"right"
    node.rights = given_rules("hook", ["t"], [], "u", "c")
    node.identity = ClientIdentity("u", "token")
    peer = login(node, "u", "c")
    assert reason(peer) == 0
    state.start_work(Reauthorization(state, lambda name, listener: False, lambda count: None))
    node.run()
    assert peer.closed == (not is_asked)


def test_a_proof_ends_with_its_connection() -> None:
    node = bench(limits())
    node.node.state.admission.asks_sources = True
    node.identity = ClientIdentity("u", "token", None, node.wall_us / 1_000_000 + 30)
    peer = login(node, "ignored", "c")
    assert reason(peer) == 0
    node.advance(29.0)
    assert not peer.closed
    node.advance(2.0)
    (left,) = peer.take(m.Disconnect)
    assert isinstance(left, m.Disconnect)
    assert left.reason == reasons.MAXIMUM_CONNECT_TIME
    assert peer.closed


def test_given_rights_are_the_clients_only_rights() -> None:
    node = bench(limits())
    node.node.state.admission.asks_sources = True
    rules = given_rules("token", ["mine/%u"], ["mine/#"], "u", "c")
    node.identity = ClientIdentity("u", "token", rules)
    peer = login(node, "", "c")
    peer.take()
    peer.send(m.Subscribe(1, [m.SubscriptionRequest("#", 0)]))
    other = login(node, "", "d")
    other.take()
    node.identity = ClientIdentity("root", "token")
    writer = login(node, "", "w")
    writer.take()
    for topic in (b"mine/u", b"others"):
        peer.send(m.Publish(topic, b"", 1, False, False, 1, b"", 0, -1))
        writer.send(m.Publish(topic, b"", 0, False, False, 0, b"", 0, -1))
    assert acks(peer) == [0, reasons.NOT_AUTHORIZED]
    assert {each.topic for each in peer.publishes()} == {b"mine/u"}
    will = m.Will("others", b"", 0, False)
    node.identity = ClientIdentity("u", "token", rules)
    late = node.peer()
    late.send(m.Connect(5, True, 0, "x", will, None, None, {}))
    assert reason(late) == reasons.NOT_AUTHORIZED


class Trusting:
    """Enhanced authentication in one step, which the client gets data from."""

    method = "TRUST"

    def start(self, client_id: str, data: bytes | None) -> Success:
        return Success(b"proof", "u")

    def step(self, data: bytes | None) -> Success:
        raise AssertionError("there is one step")


def test_hooks_give_rights_after_an_exchange_too() -> None:
    node = bench(limits())
    control = node.node.state.admission
    control.authenticators["TRUST"] = Trusting
    control.asks_rights = True
    node.rights = given_rules("hook", ["mine"], [], "u", "c")
    peer = node.peer()
    connect = m.Connect(5, True, 0, "c", None, None, None, {21: "TRUST", 17: 1000})
    peer.send(connect, publication(1, 1))
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    assert (connack.reason, connack.properties[21], connack.properties[22]) == (
        0,
        "TRUST",
        b"proof",
    )
    assert acks(peer) == [reasons.NOT_AUTHORIZED]
    assert peer.connection.username == "u"


def test_a_failed_exchange_counts_for_a_lockout_of_its_user() -> None:
    node = bench(limits(lockout_failures=1, lockout_scopes=["user"]))
    node.node.state.admission.authenticators["TRUST"] = lambda: Distrusting()
    peer = node.peer()
    peer.send(m.Connect(5, True, 0, "c", None, None, None, {21: "TRUST"}))
    assert reason(peer) == reasons.NOT_AUTHORIZED
    assert node.node.state.admission.lockouts.names() == [("user", "mallory")]


class Distrusting(Trusting):
    """The same, for a client that is refused."""

    def start(self, client_id: str, data: bytes | None) -> Failure:  # type: ignore[override]
        return Failure("no", "mallory")


def test_long_names_are_kept_short_and_apart() -> None:
    names = [bounded_name("x" * 60_000 + end) for end in ("a", "b")]
    assert names[0] != names[1]
    assert max(map(len, names)) < 300
    assert bounded_name("pump-7") == "pump-7"


@given(text=st.text(max_size=40) | st.from_regex(r"[0-9a-f.:/]{1,30}", fullmatch=True))
def test_any_text_is_an_address_or_refused_in_one_line(text: str) -> None:
    refusal = ""
    try:
        name = ban_address(text)
    except BadBanName as error:
        refusal = str(error)
    else:
        assert ban_address(name) == name
    assert refusal.isprintable()


NOT_BANS = st.sampled_from([b"{}", b"[]", b"{", b'{"until_us":"x"}', b'{"until_us":1e99}', b"\xff"])
BANS = st.sampled_from([b"", b'{"until_us":0}', b'{"until_us":7,"x":1}'])
KEYS = st.sampled_from([b"client c", b"address 1.2.3.4/99", b"address x/y", b"x", b"\xff y", b" "])


@given(st.lists(st.tuples(KEYS | st.binary(max_size=20), NOT_BANS | BANS), max_size=20))
def test_a_damaged_ban_harms_no_other(records: list[tuple[bytes, bytes]]) -> None:
    state = bench(limits()).recorded()
    recovery = Recovery(state)
    for key, payload in [(b"client kept", b'{"until_us":0}'), *records]:
        recovery.apply(Record(0, BAN, client_id=key, payload=payload))
    assert state.bans.find("client", "kept", state.wall_us) is not None
    assert state.bans.find("address", "1.2.3.4", state.wall_us) is None
    for scope, name in state.bans.names():
        state.bans.lift(scope, name)
    assert len(state.bans) == 0


LONG_S = 1000
WILL = m.Will("w", bytes(400), 1, False, {})


def open_session(
    node: NodeBench, client_id: str, *, clean: bool = True, will: m.Will | None = None
) -> int:
    """The reason in CONNACK for a durable session of alice, which is then closed."""
    peer = node.peer()
    expiry: m.Properties = {p.SESSION_EXPIRY_INTERVAL: LONG_S}
    peer.send(m.Connect(5, clean, 0, client_id, will, "alice", b"right", expiry))
    node.settle()
    found = reason(peer)
    if not peer.closed:
        peer.send(m.Disconnect(0, {}))
        node.settle()
    return found


def suback(node: NodeBench, peer: Peer, filter: str) -> int:
    peer.send(m.Subscribe(7, [m.SubscriptionRequest(filter, 1)]))
    node.settle()
    (found,) = peer.take(m.Suback)
    assert isinstance(found, m.Suback)
    return found.reasons[0]


@pytest.mark.parametrize("will", [None, WILL])
def test_durable_sessions_and_wills_use_up_the_quota(will: m.Will | None) -> None:
    node = bench(limits(bytes_per_user=2000, period_s=1e9))
    node.node.state.admission.checks_passwords = True
    node.valid_passwords["alice"] = b"right"
    early = login(node, "alice", "early")
    assert reason(early) == 0
    found = [open_session(node, f"c{number}", will=will) for number in range(20)]
    most = 10 if will is None else 3
    assert 0 < found.count(0) <= most
    assert found == sorted(found)
    assert set(found) == {0, reasons.QUOTA_EXCEEDED}
    # A session that leaves nothing in the log costs nothing, nor do its subscriptions.
    assert reason(login(node, "alice", "clean")) == 0
    assert suback(node, early, "t") == 1
    appended = node.node.state.appended
    open_session(node, "c0", will=will)
    assert node.node.state.appended == appended


def test_a_rate_of_bytes_refuses_sessions_in_a_loop() -> None:
    node = bench(limits(client=RateLimits(bytes_per_s=300)))
    found = [open_session(node, "c", will=WILL) for _ in range(5)]
    assert found[0] == 0
    assert found[-1] == reasons.CONNECTION_RATE_EXCEEDED
    node.advance(60.0)
    assert open_session(node, "c", will=WILL) == 0


def test_the_reserve_is_not_for_new_sessions_and_subscriptions() -> None:
    node = bench(limits())
    state = node.node.state
    assert open_session(node, "known") == 0
    durable = node.connect("durable", clean=False, expiry_s=LONG_S)
    durable.take(m.Connack)
    assert suback(node, durable, "t") == 1
    state.disk_full = True
    before = state.appended
    assert open_session(node, "new") == reasons.QUOTA_EXCEEDED
    assert open_session(node, "known") == reasons.QUOTA_EXCEEDED
    assert open_session(node, "known", clean=False, will=WILL) == reasons.QUOTA_EXCEEDED
    assert suback(node, durable, "u") == reasons.QUOTA_EXCEEDED
    durable.send(m.Unsubscribe(8, ["nothing"]))
    assert len(durable.take(m.Unsuback)) == 1
    assert state.appended == before
    assert state.stats.refused_disk_full == 4
    # What there is goes on, until half of the reserve is used up.
    assert open_session(node, "known", clean=False) == 0
    assert suback(node, durable, "t") == 1
    state.is_reserve_low = True
    assert open_session(node, "known", clean=False) == reasons.QUOTA_EXCEEDED
    assert suback(node, durable, "t") == reasons.QUOTA_EXCEEDED
    assert reason(login(node, "", "clean", b"")) == 0
    durable.send(m.Unsubscribe(9, ["t"]))
    node.settle()
    assert len(durable.take(m.Unsuback)) == 1


def test_client_ids_of_new_sessions_are_bounded() -> None:
    node = bench(limits())
    long = "\u00e9" * 300
    assert open_session(node, "x" * 512) == 0
    assert open_session(node, long) == reasons.CLIENT_IDENTIFIER_NOT_VALID
    node.node.state.config.client_id_bytes = 65_535
    assert open_session(node, long) == 0
    node.node.state.config.client_id_bytes = 512
    assert open_session(node, long, clean=False) == 0
