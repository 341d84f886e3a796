"""What is logged about something that happens again and again."""

import logging

import pytest

from holdfast.io.peers.complaints import COMPLAINTS_MAX, INTERVAL_S, Complaints


def test_the_same_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 1000.0
    complaints = Complaints(lambda: now)

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    complaints.say("n1", "refused", "n1: refused")
    complaints.say("n1", "refused", "n1: refused again")
    complaints.say("n2", "refused", "n2: refused")
    assert said() == ["peer_problem text='n1: refused'", "peer_problem text='n2: refused'"]
    complaints.say("n1", "slow", "n1: slow")
    complaints.say("n1", "refused", "n1: refused")
    assert said() == ["peer_problem text='n1: slow'", "peer_problem text='n1: refused'"]
    now += INTERVAL_S
    complaints.say("n1", "refused", "n1: still refused")
    complaints.say("n1", "refused", "n1: still refused")
    assert said() == ["peer_problem text='n1: still refused'"]
    complaints.forget("n1")
    complaints.say("n1", "refused", "n1: refused anew")
    assert said() == ["peer_problem text='n1: refused anew'"]


def test_memory_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(lambda: 0.0)
    for number in range(COMPLAINTS_MAX + 10):
        complaints.say(str(number), "what", "text")
    assert len(complaints._said) == COMPLAINTS_MAX
    caplog.clear()
    complaints.say("5", "what", "forgotten, so said again")
    complaints.say(str(COMPLAINTS_MAX + 9), "what", "still known")
    assert [record.getMessage() for record in caplog.records] == [
        "peer_problem text='forgotten, so said again'"
    ]
