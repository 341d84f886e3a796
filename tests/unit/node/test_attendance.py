"""The members that the only voter waits for at its start. Whole clusters: test_cluster_put_back."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.node.attendance import Attendance
from holdfast.node.metadata.state_machine import peer_id
from holdfast.node.raft.log import Membership

ALONE_S = 60.0


def only_voter(removed: tuple[tuple[str, str], ...]) -> Attendance:
    """n1 after a start, with n2 and n3 as learners in its Raft log; metadata without n3."""
    own, *others = (peer_id(f"n{number}", "i") for number in (1, 2, 3))
    meta = SimpleNamespace(
        membership=Membership((own,), tuple(others)),
        node_id="n1",
        log_end=(1, 9),
        term=1,
        hold=lambda: None,
        release=lambda *_: None,
    )
    nodes = {name: SimpleNamespace(state="up") for name in ("n1", "n2")}
    context = SimpleNamespace(
        metadata=SimpleNamespace(nodes=nodes, removed=removed), connected=set()
    )
    state = SimpleNamespace(note=lambda *_: None)
    return Attendance(*cast(Any, (state, context, meta)), "i", 2.0, ALONE_S, 0.0)


@pytest.mark.parametrize(
    ("removed", "awaited"),
    [
        # Killed after the removal, before the change of the voters: n3 gets no link any more.
        ((("n3", "i"),), ["n2"]),
        # Another disk of that name was removed, or n3 has only begun to join.
        ((("n3", "earlier"),), ["n2", "n3"]),
        ((), ["n2", "n3"]),
    ],
)
def test_a_removed_node_is_not_awaited(
    removed: tuple[tuple[str, str], ...], awaited: list[str]
) -> None:
    attendance = only_voter(removed)
    assert attendance.missing(ALONE_S / 2) == awaited
    assert attendance.missing(ALONE_S) == []


def test_the_only_voter_whose_others_were_all_removed_goes_on_at_once() -> None:
    attendance = only_voter((("n2", "i"), ("n3", "i")))
    assert attendance.is_held
    attendance.step(0.1)
    assert not attendance.is_held
