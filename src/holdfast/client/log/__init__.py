"""Reads the log from Python: every message that the broker keeps, by topic and time, and live.

    from holdfast.client.log import LogClient

    log = LogClient("127.0.0.1:18083")
    for message in log.read("plant/#", start="-1h"):
        print(message.time, message.topic, message.payload)

`AsyncLogClient` has the same for asyncio. docs/log-client.md is the guide. The names here are
loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.client.admin_connection import AdminError as AdminError
    from holdfast.client.log.aio import AsyncLogClient as AsyncLogClient
    from holdfast.client.log.aio import AsyncLogCursor as AsyncLogCursor
    from holdfast.client.log.client import LogClient as LogClient
    from holdfast.client.log.cursor import LogCursor as LogCursor
    from holdfast.client.log.errors import LogGap as LogGap
    from holdfast.client.log.errors import LogGapError as LogGapError
    from holdfast.client.log.errors import LogOptionError as LogOptionError
    from holdfast.client.log.errors import LogRestored as LogRestored
    from holdfast.client.log.errors import LogRestoredError as LogRestoredError
    from holdfast.client.log.errors import LogTruncatedError as LogTruncatedError
    from holdfast.client.log.messages import LogMessage as LogMessage
    from holdfast.client.log.offset_table import OffsetConflict as OffsetConflict
    from holdfast.client.log.offset_table import OffsetTable as OffsetTable
    from holdfast.client.log.position import Position as Position

_HOMES: Final = {
    "holdfast.client.admin_connection": "AdminError",
    "holdfast.client.log.aio": "AsyncLogClient AsyncLogCursor",
    "holdfast.client.log.client": "LogClient",
    "holdfast.client.log.cursor": "LogCursor",
    "holdfast.client.log.errors": "LogGap LogGapError LogOptionError LogRestored LogRestoredError"
    " LogTruncatedError",
    "holdfast.client.log.messages": "LogMessage",
    "holdfast.client.log.offset_table": "OffsetConflict OffsetTable",
    "holdfast.client.log.position": "Position",
}
_MODULES: Final = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
