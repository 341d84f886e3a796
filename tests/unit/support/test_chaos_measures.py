"""The measurements of the chaos tests, and the event log of their clients in processes."""

from pathlib import Path

import pytest

from tests.e2e.chaos_campaign import Outcome, Round, Watched
from tests.e2e.chaos_clients import Publisher
from tests.e2e.chaos_faults import plan
from tests.e2e.chaos_parties import on_loopback
from tests.e2e.chaos_site import busiest
from tests.e2e.event_log import EventReader, EventWriter
from tests.e2e.ledger import Interest, Ledger
from tests.e2e.ledger_checks import check
from tests.e2e.ledger_story import tell_all
from tests.e2e.test_cluster_chaos import FAULTS, schedule


def probe(*answers: tuple[float, str]) -> Publisher:
    made = Publisher("probe", on_loopback(1), 5, Ledger(), ["a", "b"], 1)
    made.answers = list(answers)
    return made


@pytest.fixture
def at_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.e2e.chaos_campaign.time.monotonic", lambda: 100.0)


@pytest.mark.usefixtures("at_100")
class TestStall:
    def test_is_the_longest_silence_after_the_fault(self) -> None:
        """Not one before it, nor on a topic that was not affected."""
        acked = probe((10, "a"), (15, "a"), (15.5, "b"), (16.5, "a"), (99.9, "a"))
        watched = Watched(acked, {"a", "other"}, 15.2)
        acked.answers += [(99.95, "b")]
        assert watched.stall_s() == pytest.approx(83.4)
        assert watched.newest_s() == 99.9
        acked.answers[4:5] = [(16.6 + n / 10, "a") for n in range(834)]
        assert watched.stall_s() == pytest.approx(1.5)

    def test_an_acknowledgement_just_after_the_fault_does_not_end_it(self) -> None:
        watched = Watched(probe((10, "a"), (10.6, "a"), (12, "a"), (99.9, "a")), {"a"}, 10.5)
        assert watched.stall_s() == pytest.approx(87.9)

    def test_one_that_has_not_ended(self) -> None:
        watched = Watched(probe((10, "a"), (20, "b")), {"a"}, 15)
        assert watched.stall_s() == pytest.approx(90)

    def test_answers_from_the_last_before_the_fault_are_counted(self) -> None:
        acked = probe(*((n / 10, "ab"[n % 2]) for n in range(990)))
        watched = Watched(acked, {"a"}, 50.05)
        assert watched.stall_s() == pytest.approx(1.2)
        assert Watched(acked, set(), 50.05).newest_s() == float("inf")


def test_busiest() -> None:
    leaders = dict.fromkeys(range(64), "n1") | {7: ""}
    assert busiest(leaders, ["a", "b", "c"]) == "n1"
    assert busiest(dict.fromkeys(range(64), ""), ["a"]) == ""
    assert busiest({}, ["a"]) == ""


def test_schedule_has_every_kind_before_one_comes_twice() -> None:
    count = len(FAULTS)
    planned = schedule(2 * count + 1, 1, FAULTS)
    names = [each.kind for each in planned]
    assert len({each.seed for each in planned}) == len(planned)
    kinds = sorted(FAULTS)
    assert sorted(names[:count]) == sorted(names[count : 2 * count]) == kinds
    assert len(names) == 2 * count + 1


def test_report_tells_what_was_broken() -> None:
    outcome = Outcome(1, [Round("SIGSTOP", ("n1",), 0.25, 1.0), Round("SIGSTOP", (), None, 2.0)])
    ledger = Ledger()
    ledger.accuse("session lost", "all-2", "at connection 2")
    ledger.fault("SIGSTOP", 10.0, 12.0)
    ledger.subscribe("all-2", [Interest("#", 2)])
    ledger.connected("all-2", 8.0, "n2")
    ledger.subscribed("all-2", 8.1)
    ledger.send(("p", "t", 0), 2, 9.5)
    ledger.acknowledge(("p", "t", 0), 11.5)
    outcome.violations = check(ledger)
    outcome.stories = tell_all(ledger, outcome.violations)
    report = outcome.report()
    assert "0.250" in report
    assert "'session lost': 1" in report
    assert "lost, all-2: 1 times" in report
    assert "sent with QoS 2 at -0.500, 1 times, acknowledged at 1.500" in report
    assert "delivered: to nobody" in report
    assert "all-2: n2 at -2.000" in report


def test_event_log(tmp_path: Path) -> None:
    """Read while it is written, also when the last line is half there."""
    path = tmp_path / "client.events"
    ledger, reader = Ledger(), EventReader(path)
    assert reader.read(ledger) == 0
    events = EventWriter(path, "client")
    key, other = ("client", "t", 0), ("client", "t", 1)
    events.write("subscribe", filters=[("t", 2)])
    events.write("subscribed")
    events.write("connected", node="n1")
    events.message("send", key, qos=2, dup=False, packet_id=1)
    assert reader.read(ledger) == 4
    events.message("send", key, qos=2, dup=True, packet_id=1)
    events.message("ok", key, packet_id=1)
    events.message("send", other, qos=1, dup=False, packet_id=2)
    events.message("refused", other, packet_id=2, reason=0x97)
    events.message("deliver", key, connection=1, dup=False)
    events.write("accuse", kind="session lost", text="at connection 2")
    events.close()
    text = path.read_bytes()
    path.write_bytes(text[:-10])
    assert reader.read(ledger) == 5
    assert check(ledger) == []
    path.write_bytes(text)
    assert reader.read(ledger) == 1
    assert [violation.kind for violation in check(ledger)] == ["session lost"]
    assert ledger.sent[key].sends == 2
    assert (set(ledger.acknowledged), ledger.refused) == ({key}, {other})
    assert ledger.subscriptions["client"].history[0].key == key


def test_a_round_of_a_report_is_planned_again() -> None:
    said = str(Round("SIGSTOP", ("n1",), None, 1.0, 0.0, "77-3", ("n1 paused",)))
    assert said == "SIGSTOP@77-3: n1 paused"
    (planned,) = plan([said.partition(":")[0]], FAULTS, 1)
    assert (planned.kind, planned.seed) == ("SIGSTOP", "77-3")
    assert planned.fault is FAULTS["SIGSTOP"]
