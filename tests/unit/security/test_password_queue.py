"""The queue of password checks: bounded, and fair between addresses."""

import random

from holdfast.security.password_queue import PasswordQueue


def test_addresses_take_turns() -> None:
    queue: PasswordQueue[str] = PasswordQueue()
    for number in range(100):
        assert queue.offer("storm", f"storm-{number}")
    assert queue.offer("other", "other-0")
    assert queue.offer("other", "other-1")
    assert [queue.take() for _ in range(5)] == [
        "storm-0",
        "other-0",
        "storm-1",
        "other-1",
        "storm-2",
    ]


def test_a_full_address_leaves_room_for_others() -> None:
    queue: PasswordQueue[int] = PasswordQueue(10, 4)
    assert [queue.offer("a", number) for number in range(6)] == [True] * 4 + [False] * 2
    assert queue.offer("b", 1)
    queue.take()
    assert queue.offer("a", 7)


def test_all_together_are_bounded() -> None:
    queue: PasswordQueue[int] = PasswordQueue(10, 4)
    taken = [queue.offer(f"a{number}", number) for number in range(20)]
    assert taken == [True] * 10 + [False] * 10
    assert len(queue) == 10


def test_every_check_comes_out_once_and_in_its_address_order() -> None:
    chance = random.Random(3)
    queue: PasswordQueue[tuple[str, int]] = PasswordQueue(50, 20)
    put: list[tuple[str, int]] = []
    got: list[tuple[str, int]] = []
    for number in range(5000):
        if chance.random() < 0.5:
            check = (chance.choice("abcd"), number)
            if queue.offer(check[0], check):
                put.append(check)
        else:
            taken = queue.take()
            if taken is not None:
                got.append(taken)
        assert len(queue) == len(put) - len(got)
    while (last := queue.take()) is not None:
        got.append(last)
    for address in "abcd":
        assert [one for one in got if one[0] == address] == [
            one for one in put if one[0] == address
        ]
