"""Round robin among the members of a shared subscription."""

from holdfast.topics.shared import SharedGroup


def group_of(*members: str) -> SharedGroup:
    group = SharedGroup("g", "a/#")
    for member in members:
        assert group.add(member)
    return group


def always(member: object) -> bool:
    return True


def test_round_robin() -> None:
    group = group_of("a", "b", "c")
    assert [group.next(always) for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_members_that_are_not_ready_are_passed_over() -> None:
    group = group_of("a", "b", "c")
    assert group.next(lambda member: member != "a") == "b"
    assert group.next(always) == "c"
    assert group.next(lambda member: member == "b") == "b"
    assert group.next(lambda member: False) is None
    assert group.next(always) == "c"


def test_each_member_is_asked_once() -> None:
    group = group_of("a", "b", "c")
    asked: list[object] = []

    def refuse(member: object) -> bool:
        asked.append(member)
        return False

    assert group.next(refuse) is None
    assert asked == ["a", "b", "c"]


def test_a_member_that_leaves_takes_no_turn_of_others() -> None:
    group = group_of("a", "b", "c")
    assert group.next(always) == "a"
    assert group.remove("a")
    assert [group.next(always) for _ in range(3)] == ["b", "c", "b"]
    assert group.remove("c")
    assert group.next(always) == "b"
    assert group.remove("b")
    assert group.next(always) is None
    assert len(group) == 0


def test_joining_twice_changes_nothing() -> None:
    group = group_of("a", "b")
    assert not group.add("a")
    assert not group.remove("c")
    assert group.members() == ["a", "b"]
