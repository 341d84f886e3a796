"""Counters beside a table: each is what the table holds, after any order of calls."""

import random

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.node.config import NodeConfig
from holdfast.node.session.cursor import Cursor, Delivery
from holdfast.node.session.message import Message
from holdfast.node.state.recorded_state import PROGRESS, RecordedState, Timer


@pytest.mark.parametrize("seed", range(20))
def test_timers_that_have_fired_do_not_count_as_cancelled(seed: int) -> None:
    """Their number decides when the heap is built again."""
    chance = random.Random(seed)
    state = RecordedState(NodeConfig(partitions=1), Journal(1))
    timers: list[Timer] = []
    for now in range(200):
        timers.append(state.arm(now + chance.randrange(9), PROGRESS, None))
        if chance.random() < 0.5:
            state.cancel(chance.choice(timers))
        if chance.random() < 0.5:
            state.pop_timers(now, 3)
        state.check()


def _delivery(offset: int) -> Delivery:
    message = Message(b"t", bytes(offset % 7), 1, False, b"", -1, 0, b"p")
    message.partition, message.offset = 0, offset
    return Delivery(message, 1, False, None)


@pytest.mark.parametrize("seed", range(40))
def test_the_bytes_of_an_outbox_are_those_of_its_deliveries(seed: int) -> None:
    """Also after an overflow during a read. Counted too low, the outbox has no bound in bytes."""
    chance = random.Random(seed)
    cursor = Cursor()
    for offset in range(300):
        step = chance.choice(("push", "push", "pop", "behind", "read", "end", "cancel"))
        if step == "push" and cursor.tailing:
            cursor.push(_delivery(offset))
        elif step == "pop" and cursor.outbox:
            cursor.pop()
        elif step == "behind" and cursor.tailing:
            cursor.fall_behind([offset])
        elif step == "read" and not cursor.tailing and not cursor.reading:
            cursor.start_read()
        elif step == "end" and cursor.reading:
            # The records of the read come before those that were tailed.
            cursor.reading = False
            cursor.push(_delivery(offset))
            cursor.reading = True
            cursor.finish_read([offset], chance.random() < 0.5)
        elif step == "cancel" and cursor.reading:
            cursor.cancel_read()
        cursor.check()
