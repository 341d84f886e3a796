"""The sessions of the replicated state, by owner and home partition."""

import pytest

from holdfast.log.partition import partition_of
from holdfast.node.session.session import Session
from holdfast.node.state.replicated import OpenSessions


def test_sessions_come_in_the_order_of_their_opening() -> None:
    """The order decides which of them is closed first, so it must not depend on addresses. Else a
    seed of the simulator is not one run."""
    table = OpenSessions(2)
    sessions = [Session(f"c{number}") for number in range(100)]
    for session in sessions:
        session.owner = "n1"
        table.add(session)
    for session in sessions[::3]:
        table.discard(session)
    for session in sessions[::3]:
        table.add(session)
    order = [session for number, session in enumerate(sessions) if number % 3] + sessions[::3]
    for home in range(2):
        assert table.of("n1", home) == [
            session for session in order if partition_of(session.key, 2) == home
        ]
    table.check(sessions)


def test_a_home_has_its_sessions_whatever_their_owner() -> None:
    """A snapshot lists one home after the other. A session that another list has would be missing
    after a recovery."""
    table = OpenSessions(2)
    sessions = [Session(f"c{number}") for number in range(60)]
    for number, session in enumerate(sessions):
        session.owner = ("", "n1", "n2")[number % 3]
        table.add(session)
    table.check(sessions)
    for home in range(2):
        own = {each for each in sessions if partition_of(each.key, 2) == home}
        assert set(table.all_of(home)) == own
        for session in own:
            table.discard(session)
            session.owner = "n2" if session.owner == "" else ""
            table.add(session)
        assert set(table.all_of(home)) == own
    assert table.counts == {"n1": 0, "n2": 20}
    assert not any(table.has(each) for each in sessions if not each.owner)
    table.check(sessions)
    table.discard(sessions[0])
    with pytest.raises(AssertionError, match="is missing"):
        table.check(sessions)
