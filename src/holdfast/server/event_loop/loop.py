"""What a process that serves runs on: uvloop where it is installed, asyncio's own loop otherwise,
and a garbage collector that keeps out of the way."""

import asyncio
import gc


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def is_uvloop(loop: asyncio.AbstractEventLoop) -> bool:
    return type(loop).__module__.partition(".")[0] == "uvloop"


def spare_the_collector() -> None:
    """Once everything is loaded. What is kept lives long, and what a message allocates is freed by
    its reference count: full collections would only cost pauses that grow with what is kept."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
