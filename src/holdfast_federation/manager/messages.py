"""Bodies of the REST interface. Published names are kept; the others are in snake case."""

from typing import Annotated, Generic, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from holdfast_federation.manager.state.federation_state import Rule

Id = Annotated[int, Meta(ge=0)]
Short = Annotated[str, Meta(max_length=255)]
Finite = Annotated[float, Meta(ge=0, le=1e9)]

T = TypeVar("T")


class Envelope(Struct, Generic[T]):
    status: str
    """`success` or `error`."""
    code: int
    """The status code of the answer."""
    data: T | None = None
    description: str = ""
    """Why it was refused, and what to do; of a success: what is not as safe as it should be."""


class JoinRequest(Struct, kw_only=True):
    """The body of a join. The published body is `ip` alone. Unknown fields are ignored, as in the
    published manager."""

    ip: Annotated[str, Meta(min_length=1, max_length=300)]
    """The URL of the member's broker: `tcp://host:1883`; also ssl, ws, wss."""
    uuid: Annotated[str, Meta(pattern=r"^([0-9A-Za-z-]{8,64})?$")] = ""
    """The identity that makes it the same member again. A member with one reports and follows
    `watch`."""
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    advertise: Short = ""
    """The address at which other members connect to it."""
    labels: Annotated[dict[Short, Short], Meta(max_length=32)] = {}
    capacity: Annotated[int, Meta(ge=0, le=64)] = 0
    """The most neighbours that it accepts, 2 or more; 0: the federation's limit."""
    rtts: Annotated[dict[Id, Finite], Meta(max_length=1000)] = {}
    """The measured round trips to members, in milliseconds, by id."""


class Neighbor(Struct):
    id: int
    ip: str
    advertise: str | UnsetType = UNSET
    """Absent if it has none."""


class JoinAnswer(Struct, rename={
    "core_ann_interval": "coreAnnInterval", "beacon_interval": "beaconInterval",
}):  # fmt: skip
    id: int
    ip: str
    """Empty, as published."""
    neighbors: list[Neighbor]
    redundancy: int
    core_ann_interval: int
    """Nanoseconds, as `beacon_interval`."""
    beacon_interval: int
    revision: int | UnsetType = UNSET
    """Only for a member with a uuid, as what follows."""
    token: str | UnsetType = UNSET
    """For everything this member asks from now on; absent where its caller's goes on to hold."""


class LinkReport(Struct, kw_only=True):
    peer: Id
    up: bool
    rtt_ms: float | None = None


class Report(Struct, kw_only=True):
    """The report of a member about its links, every 5 s."""

    links: Annotated[list[LinkReport], Meta(max_length=1000)] = []
    epoch: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    digest: Short = ""
    """Digest of its link-state database."""
    interest: Annotated[int, Meta(ge=0)] = 0
    """Filters its clients are subscribed to."""


class Desired(Struct):
    revision: int
    neighbors: list[Neighbor]


class NodeView(Struct, kw_only=True):
    id: int
    ip: str
    uuid: str
    certificate: str = ""
    """Name of the one it has joined with."""
    epoch: int
    advertise: str
    labels: dict[str, str]
    capacity: int
    state: str
    latency_ms: float | None
    """None: not measured, or the last measurement failed."""
    neighbors: list[int]
    joined_at_s: float
    reported_ago_s: float | None
    digest: str
    interest: int


class LinkView(Struct, kw_only=True):
    a: int
    b: int
    pinned: bool
    rtt_ms: float | None
    up: bool | None
    """The state that its ends report; None: neither has lately."""


class TopologyView(Struct, kw_only=True):
    revision: int
    nodes: list[NodeView]
    links: list[LinkView]
    forbidden: list[tuple[int, int]]
    articulation_points: list[int]
    components: int
    diameter: int | None
    """None where some member cannot reach another."""


class HealthView(Struct, kw_only=True):
    healthy: bool
    """Everybody answers, and the loss of any one member leaves the others connected."""
    frozen: bool
    """More than half of the members fail at once: nobody is removed."""
    members: int
    states: dict[str, int]
    problems: list[str]
    revision: int


class LinkRule(Struct, kw_only=True):
    a: Id
    b: Id
    rule: Rule
    """`none` takes an earlier rule back."""


class LinkRules(Struct):
    links: Annotated[list[LinkRule], Meta(min_length=1, max_length=1000)]


class Watched(Struct, kw_only=True):
    revision: int
    changed: bool
    """False: nothing has for as long as was asked."""
    links: list[tuple[int, int]]
    neighbors: list[Neighbor] | None
    """The neighbours of the member that was asked for."""


class TokenRequest(Struct, kw_only=True):
    valid_s: Annotated[float, Meta(ge=1, le=31_536_000)] = 86_400.0


class TokenView(Struct, kw_only=True):
    token: str
    """Shown once; good for one join."""
    expires_at_s: float


class AuditView(Struct, kw_only=True):
    at_s: float
    revision: int
    actor: str
    action: str
    detail: str
