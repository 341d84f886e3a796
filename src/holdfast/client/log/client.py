"""Reads the log from Python: `LogClient`."""

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, Self

from holdfast.client.admin_access import AdminAccess, AdminAccessError, admin_address, load_access
from holdfast.client.admin_connection import Server
from holdfast.client.log.access import ServedLog
from holdfast.client.log.cursor import LogCursor, LogSelection, OnGap
from holdfast.client.log.errors import LogOptionError
from holdfast.client.log.groups import GroupOffsets
from holdfast.client.log.position import EARLIEST, Place, resolve_place
from holdfast.log.reading.topic_filter import Clause, TopicFilter
from holdfast.protocol.topics.names import InvalidFilter, check_filter, is_shared

if TYPE_CHECKING:
    from holdfast.client.log.lake_log import LakeLog

WAIT_S: Final = 300.0
"""The seconds for which a read waits for servers that are away. A restart or an upgrade takes
less."""
Topics = str | Collection[str]


class LogLocation:
    """The location of a log: the admin ports of a broker or a cluster, or a lake.

    It keeps no connection: each read has its own. Any thread may use it.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        token_file: str | os.PathLike[str] = "",
        ca_file: str | os.PathLike[str] = "",
        wait_s: float = WAIT_S,
        lake: str | os.PathLike[str] = "",
    ) -> None:
        """`servers`: HOST:PORT of the admin port, or https://HOST:PORT; several nodes of one
        cluster as a list or separated by commas. Reads prefer the first one that responds.
        `token_file`: a token of the role `reader`; without it the variable HOLDFAST_TOKEN, if set.
        `ca_file`: the signers of the certificates of https ports; by default those of the system.
        `wait_s`: how long a read waits for servers that are away. `lake`: a directory, or a URL
        such as s3://BUCKET/NAME, of a lake of this log, which has its older part. Raises
        LogOptionError."""
        self._servers, self._access = _access(servers, os.fspath(token_file), os.fspath(ca_file))
        if not wait_s >= 0:
            raise LogOptionError(f"wait_s is {wait_s}; allowed: 0 or more seconds")
        self._wait_s = wait_s
        self._lake = os.fspath(lake)

    @classmethod
    def offline(cls, *, lake: str | os.PathLike[str]) -> Self:
        """The part of a log that a lake has.

        Without a broker there are no groups, and a read cannot follow.
        """
        if not lake:
            raise LogOptionError("give a lake: its directory, or a URL such as s3://BUCKET/NAME")
        found = cls.__new__(cls)
        found._servers, found._access, found._wait_s = (), AdminAccess(), 0.0
        found._lake = os.fspath(lake)
        return found

    def _open(self, selection: LogSelection, group: str, on_gap: OnGap | None) -> LogCursor:
        """The cursor of a read, positioned. It blocks while it asks the servers."""
        if selection.follow and not self._servers:
            raise LogOptionError("follow needs the admin port of a broker, not a lake alone")
        if group and not self._servers:
            raise LogOptionError("group needs the admin port of a broker, not a lake alone")
        own, lake = open_log(
            self._servers, self._access, self._wait_s, self._lake, selection.topics,
            is_strict=on_gap is None,
        )  # fmt: skip
        offsets = GroupOffsets(group, own.servers) if group and isinstance(own, ServedLog) else None
        access = lake or own
        assert access is not None
        try:
            return LogCursor(access, selection, offsets, on_gap)
        except BaseException:
            access.close()
            raise


class LogClient(LogLocation):
    """The log of a broker or a cluster, over the admin ports, or of a lake.

    log = LogClient("127.0.0.1:18083")
    for message in log.read("plant/+/temperature", start="-1h"):
        print(message.time, message.topic, message.payload)
    """

    def read(
        self,
        topics: Topics = "#",
        *,
        start: Place | None = None,
        end: Place | None = None,
        follow: bool = False,
        group: str = "",
        partitions: Collection[int] | None = None,
        on_gap: OnGap | None = None,
        idle_s: float | None = None,
    ) -> LogCursor:
        """Begins to read.

        `topics`: MQTT filters; "#" matches all topics, also those that begin with $.
        `start`: "earliest" (the default), "latest", a time, "-15m" or a timedelta (so long ago), or
        a Position. A time means the first record of each partition that is not older.
        `end`: likewise; by default where the log ends now.
        `follow`: go on with messages as they are committed.
        `group`: begin where the group has committed, and at `start` in other partitions.
        `partitions`: only these.
        `on_gap`: called with each gap, before the messages behind it. By default a gap raises
        LogGapError.
        `idle_s`: with `follow`, `batches` gives an empty list when nothing came for so long.

        Raises LogOptionError, AdminError if no server responds, and LogTruncatedError for a
        position behind the end of the log.
        """
        selection = select(topics, start, end, follow, partitions, idle_s)
        return self._open(selection, group, on_gap)


def select(
    topics: Topics,
    start: Place | None,
    end: Place | None,
    follow: bool,
    partitions: Collection[int] | None,
    idle_s: float | None,
) -> LogSelection:
    """The checked options of a read (see `LogClient.read`). Raises LogOptionError."""
    if follow and end is not None:
        raise LogOptionError("give end or follow, not both")
    if idle_s is not None and not (follow and idle_s > 0):
        raise LogOptionError(f"idle_s is {idle_s}; allowed: more than 0 seconds, with follow")
    return LogSelection(
        _topic_filter(topics),
        resolve_place("start", EARLIEST if start is None else start),
        None if end is None else resolve_place("end", end),
        follow,
        None if partitions is None else frozenset(partitions),
        idle_s,
    )


def _topic_filter(topics: Topics) -> TopicFilter:
    """The filter of a read. Raises LogOptionError."""
    filters = (topics,) if isinstance(topics, str) else tuple(topics)
    if not filters:
        raise LogOptionError("topics is empty; allowed: one MQTT filter or more")
    for each in filters:
        try:
            check_filter(each)
            if is_shared(each):
                raise InvalidFilter("a shared subscription has no place here")
        except InvalidFilter as error:
            raise LogOptionError(f"topics has {each!r}: {error}") from None
    return TopicFilter() if "#" in filters else TopicFilter((Clause(filters),))


def _access(
    servers: str | Sequence[str], token_file: str, ca_file: str
) -> tuple[tuple[Server, ...], AdminAccess]:
    """The servers, and the way to them. Raises LogOptionError."""
    given = servers.split(",") if isinstance(servers, str) else servers
    try:
        found = [admin_address(each) for each in given]
        schemes = {is_https for _, _, is_https in found}
        if len(schemes) != 1:
            raise LogOptionError("servers has https:// for some only, or is empty")
        return tuple((host, port) for host, port, _ in found), load_access(
            token_file, ca_file, is_https=schemes == {True}
        )
    except AdminAccessError as error:
        raise LogOptionError(f"servers, token_file or ca_file: {error}") from None


def open_log(
    servers: Sequence[Server],
    access: AdminAccess,
    wait_s: float,
    lake: str,
    topics: TopicFilter,
    *,
    is_strict: bool,
) -> "tuple[ServedLog | None, LakeLog | None]":
    """Returns the log of some servers, if there are any, and the same with the lake that has its
    older part, if one is named. Raises LakeError."""
    own = ServedLog(servers, access, wait_s) if servers else None
    if not lake:
        return own, None
    # Imported here, because a program that reads no lake needs no pyarrow.
    from holdfast.client.log.lake_log import LakeLog

    return own, LakeLog(lake, own, topics, is_strict=is_strict)
