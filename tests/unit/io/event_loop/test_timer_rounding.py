"""A timer of the event loop does not fire before its time, whatever the loop rounds to."""

import asyncio

import uvloop

from holdfast.io.event_loop.broker import ROUNDING_S


def _answer(loop: asyncio.AbstractEventLoop, fired: "asyncio.Future[float]") -> None:
    fired.set_result(loop.time())


def test_timers_do_not_fire_early() -> None:
    """Else a turn would find nothing due, and set the timer again for now."""

    async def measure() -> list[float]:
        loop = asyncio.get_running_loop()
        early: list[float] = []
        for step in range(40):
            when = loop.time() + 0.0005 + step * 0.00007
            fired: asyncio.Future[float] = loop.create_future()
            loop.call_at(when + ROUNDING_S, _answer, loop, fired)
            if await fired < when:
                early.append(when)
        return early

    loop = uvloop.new_event_loop()
    try:
        assert loop.run_until_complete(measure()) == []
    finally:
        loop.close()
