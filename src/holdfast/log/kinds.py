"""Names the kinds of records, as operators see and write them.

The names are in the lists of `holdfast log`, in the records of the admin port and in the broker's
own log. A name is a promise like a kind: it never changes, and a kind without a name here is shown
by its number. A version that does not know a kind reads the record, and its recovery passes it.
"""

from typing import Final

from holdfast.log.record import (
    BAN,
    CONTROL,
    CURSOR,
    DELAYED,
    FEDERATION,
    FORGOTTEN,
    MESSAGE,
    PRODUCER,
    RELEASE,
    RETAINED,
    SESSION,
    WILL,
)

KIND_NAMES: Final = {
    MESSAGE: "message",
    RETAINED: "retained",
    SESSION: "session",
    CURSOR: "cursor",
    RELEASE: "release",
    WILL: "will",
    CONTROL: "control",
    PRODUCER: "producer",
    BAN: "ban",
    DELAYED: "delayed",
    FORGOTTEN: "forgotten",
    FEDERATION: "federation",
}
