"""Replies to `GET /api/v1/top`."""

from msgspec import Struct


class TopDurations(Struct, frozen=True):
    """The buckets of one histogram since the start, cumulative."""

    bounds: list[str]
    counts: list[float]


class TopSession(Struct, frozen=True):
    """A session with messages that its client has not taken."""

    client: str
    user: str
    remote: str
    connected: bool
    behind: bool
    """Whether it reads the log because it cannot keep up."""
    backlog: int
    """Records to read, matching or not, and messages in its outbox."""
    inflight: int
    dropped: int
    """QoS 0 messages dropped because it was slow, since the session began here."""


class TopTopic(Struct, frozen=True):
    """The estimated rates of a topic in the last 10 to 20 s."""

    topic: str
    messages_per_s: float
    bytes_per_s: float
    error_per_s: float


class TopPublisher(Struct, frozen=True):
    """The estimated rates of a client's publishes in the last 10 to 20 s."""

    client: str
    messages_per_s: float
    bytes_per_s: float
    error_per_s: float


class TopReply(Struct, frozen=True):
    """The reply to GET /api/v1/top."""

    node: str
    time_s: float
    """A monotonic clock of the node, for rates."""
    uptime_s: float
    connections: int
    sessions: int
    sessions_away: int
    sessions_behind: int
    backlog_records: int
    counters: dict[str, int]
    acknowledge: TopDurations
    deliver: TopDurations
    fdatasync: TopDurations
    slow_sessions: list[TopSession]
    topics: list[TopTopic]
    topics_problem: str
    """The reason why there are no topics and publishers, or ""."""
    publishers: list[TopPublisher] = []
