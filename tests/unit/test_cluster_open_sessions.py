"""The open sessions of the replicated state, by owner and home partition."""

from holdfast.log.partition import partition_of
from holdfast.node.session.session import Session
from holdfast.node.state.open_sessions import OpenSessions


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
