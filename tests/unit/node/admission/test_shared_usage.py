"""Lock-outs and allowances that the processes of one machine share."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.node.admission import usage
from holdfast.node.admission.limits import AdmissionLimits, RateLimits
from holdfast.node.admission.usage import REPORT_S, SharedUsage, UsageReport
from holdfast.node.config import NodeConfig
from holdfast.node.context import NEVER, ClusterContext
from holdfast.node.features import SHARED_USAGE
from holdfast.node.frame_kinds import USAGE, BadFrame
from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import reasons
from tests.support.node_bench import NodeBench, Peer

NAMES = ("n1", "n1-1", "n1-2")


class Machine:
    """Processes whose frames arrive when the time advances."""

    def __init__(self, count: int = 2, **limits: object) -> None:
        admission = AdmissionLimits(**limits)  # type: ignore[arg-type]
        settings = NodeConfig(partitions=4, sys_interval_s=0, admission=admission)
        self.benches = {name: NodeBench(settings) for name in NAMES[:count]}
        self.contexts: dict[str, ClusterContext] = {}
        self.shared: dict[str, SharedUsage] = {}
        for name, bench in self.benches.items():
            others = frozenset(self.benches) - {name}
            context = ClusterContext(name, bench.journal)
            context.connected = set(others)
            context.features = dict.fromkeys(others, SHARED_USAGE)
            self.contexts[name] = context
            self.shared[name] = SharedUsage(bench.node.state, context, others)
        self.frames = 0

    def advance(self, seconds: float) -> None:
        for bench in self.benches.values():
            bench.advance(seconds)
        for shared in self.shared.values():
            shared.step()
        for name, context in self.contexts.items():
            outgoing, context.outgoing = context.outgoing, []
            for node, kind, payload in outgoing:
                assert kind == USAGE
                assert isinstance(payload, bytes)
                self.frames += 1
                self.shared[node].handle(name, payload)

    def login(self, name: str, client_id: str, password: bytes = b"right") -> Peer:
        bench = self.benches[name]
        bench.node.state.admission.checks_passwords = True
        bench.valid_passwords["u"] = b"right"
        peer = bench.peer()
        peer.send(m.Connect(5, True, 0, client_id, None, "u", password, {}))
        return peer


def reason(peer: Peer) -> int:
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    return connack.reason


def publish(peer: Peer, count: int, size: int = 0) -> int:
    """Publishes, and returns how many were accepted."""
    messages = [
        m.Publish(b"t", bytes(size), 1, False, False, 1 + n, b"", 0, -1) for n in range(count)
    ]
    peer.send(*messages)
    return sum(each.reason < 0x80 for each in peer.take(m.Ack) if isinstance(each, m.Ack))


def test_failures_at_all_processes_lock_a_name_out_at_all() -> None:
    machine = Machine(lockout_failures=4, lockout_scopes=["user"], lockout_s=60.0)
    for turn in range(4):
        assert reason(machine.login(NAMES[turn % 2], f"c{turn}", b"wrong")) >= 0x80
        machine.advance(REPORT_S)
    assert {reason(machine.login(each, "d")) for each in NAMES[:2]} == {reasons.BANNED}
    # It is noted where the last failure was, once.
    assert sum(each.node.state.stats.lockouts for each in machine.benches.values()) == 1
    machine.advance(61.0)
    assert [reason(machine.login(each, "d")) for each in NAMES[:2]] == [0, 0]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("scope", ["user", "address", "client"])
def test_a_name_has_one_rate_over_all_processes(scope: str, count: int) -> None:
    machine = Machine(count, **{scope: RateLimits(messages_per_s=10)})
    names = NAMES[:count]
    peers = {each: machine.login(each, "c") for each in names}
    machine.advance(REPORT_S)
    assert publish(peers["n1"], 20) == 10
    machine.advance(REPORT_S)
    # What it took at one process is missing at the others.
    assert all(publish(peers[each], 20) <= 2 for each in names[1:])
    accepted, seconds = 0, 10
    for turn in range(seconds * 5):
        machine.advance(0.2)
        accepted += publish(peers[names[turn % count]], 5)
    assert 0.8 * 10 * seconds <= accepted <= 1.2 * 10 * seconds


def test_a_burst_cannot_be_had_at_each_process() -> None:
    """Not by a client that comes after it was spent, and not while it is away."""
    machine = Machine(user=RateLimits(messages_per_s=1))
    peer = machine.login("n1", "c")
    assert publish(peer, 3) == 1
    peer.lose()
    machine.advance(REPORT_S)
    assert publish(machine.login("n1-1", "c"), 3) == 0


def test_a_quota_and_connects_are_shared() -> None:
    machine = Machine(bytes_per_user=1000, user=RateLimits(connects_per_s=2))
    peers = [machine.login(each, "c") for each in NAMES[:2]]
    assert publish(peers[0], 1, 1000) == 1
    machine.advance(REPORT_S)
    assert publish(peers[1], 1, 10) == 0
    reasons_found = [reason(machine.login(NAMES[turn % 2], f"d{turn}")) for turn in range(6)]
    machine.advance(0.0)
    assert sum(each == 0 for each in reasons_found) <= 4
    machine.advance(REPORT_S)
    assert [reason(machine.login(each, "e")) for each in NAMES[:2]] != [0, 0]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.floats(0, 1)), max_size=30))
def test_all_that_is_taken_is_taken_everywhere_once(
    steps: list[tuple[int, int, float]],
) -> None:
    """After the last report the allowances of all processes are the same."""
    machine = Machine(3, user=RateLimits(bytes_per_s=10), burst_s=1000.0)
    peers = [machine.login(each, "c") for each in NAMES]
    for process, count, seconds in steps:
        publish(peers[process], count, 100)
        machine.advance(seconds)
    machine.advance(REPORT_S)
    machine.advance(REPORT_S)
    tokens = []
    for bench in machine.benches.values():
        meters = bench.node.state.admission.meters
        shared = meters._in_use["user", "bytes", "u"]
        shared.bucket.refill(bench.node.state.now)
        tokens.append(shared.bucket.tokens)
    # One that was full until the report has gained nothing meanwhile.
    assert max(tokens) - min(tokens) <= 10 * (1.0 + 2 * REPORT_S)


def test_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "FAILURES_MAX", 10)
    monkeypatch.setattr(usage, "PART_MAX", 4)
    machine = Machine(lockout_failures=100, lockout_scopes=["client"])
    for turn in range(20):
        machine.login("n1", f"c{turn}", b"wrong")
    machine.advance(REPORT_S)
    assert machine.frames == 3
    assert len(machine.benches["n1-1"].node.state.admission.failures) == 10
    # Nothing is left, so nothing is sent.
    machine.advance(REPORT_S)
    assert machine.frames == 3
    assert machine.shared["n1"].timer() == NEVER


def test_a_stranger_takes_nothing_and_garbage_is_refused() -> None:
    machine = Machine(lockout_failures=1, lockout_scopes=["user"])
    shared = machine.shared["n1"]
    report = usage.json.encode(
        UsageReport([("user", "u"), ("no-such", "x")], [("user", "no-such", "u", 1.0)])
    )
    shared.handle("n9", report)
    assert len(machine.benches["n1"].node.state.admission.lockouts) == 0
    shared.handle("n1-1", report)
    assert len(machine.benches["n1"].node.state.admission.lockouts) == 1
    for each in (b"", b"{}", b'{"failures":[["user"]],"taken":[]}', b"\xff"):
        with pytest.raises(BadFrame):
            shared.handle("n1-1", each)
