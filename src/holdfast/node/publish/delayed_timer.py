"""Sets the timer of one state's delayed messages.

Times of messages are those of the wall clock, in a cluster of the cluster clock. Timers use the
monotonic clock. So a timer only says when to compare the clock with the earliest message, and a
clock that is set back or forth meanwhile publishes no message at the wrong time.
"""

from typing import Final

from holdfast.node.state.recorded_state import DELAYED, RecordedState

LOOK_AGAIN_S: Final = 60.0
"""The longest time in seconds until the clock is compared with the earliest delayed message again.
A wall clock that is set meanwhile delays it no longer than that."""


def arm_delayed(state: RecordedState) -> None:
    """Starts the timer for the earliest delayed message, unless there is one in time."""
    table = state.delayed
    due_us = table.earliest_us()
    if due_us is None:
        return
    wait_s = min(max(0.0, (due_us - state.wall_us) / 1_000_000), LOOK_AGAIN_S)
    when = state.now + wait_s
    if not table.armed_at or when < table.armed_at:
        table.armed_at = when
        state.arm(when, DELAYED, table)
