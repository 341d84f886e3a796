"""Times and bounds of a federation member."""

from dataclasses import dataclass

from holdfast_federation.core.routing.interest import ANNOUNCED_MAX
from holdfast_federation.core.routing.link_state import FORGET_S


@dataclass(frozen=True)
class FederationConfig:
    """The times, in seconds, and the bounds of one member."""

    hello_s: float = 2.0
    """The seconds between HELLOs in one direction of a link; both together make one a second."""
    probe_after_s: float = 2.05
    """The seconds of silence after which the member requests a HELLO from the peer."""
    busy_probe_after_s: float = 1.3
    """The same after a message was sent to the peer, because most messages bring a reply."""
    probe_interval_s: float = 0.2
    probes_max: int = 3
    """The number of unanswered requests after which the link counts as down. By default that is
    2.65 s after the last frame, 1.9 s after a message."""
    slow_s: float = 60.0
    """The seconds for which `busy_probe_after_s` does not apply to a peer that replied only after a
    second request."""
    flaps_free: int = 2
    """The losses of a link within `flap_s` after which it is used again without a delay. Each
    further loss doubles the delay, from 1 s to `link_delay_max_s`."""
    flap_s: float = 60.0
    link_delay_max_s: float = 30.0
    relink_s: float = 0.1
    """The seconds after its loss for which a link is not used. Members must learn of the loss
    before it is back, because messages on it were lost too."""
    flood_delay_s: float = 0.01
    """The seconds for which announcements are collected into one frame."""
    interest_batch_s: float = 0.1
    """The seconds between announcements of new filters. Churn doubles them, up to
    `interest_batch_max_s`."""
    interest_batch_max_s: float = 5.0
    request_every_s: float = 0.25
    """The seconds between requests to the same peer."""
    refresh_s: float = 1800.0
    """The seconds between announcements of a member without changes."""
    forget_s: float = FORGET_S
    """The seconds without a newer announcement after which a member is forgotten and the messages
    for it are dropped. Not below twice `refresh_s`."""
    leave_s: float = 60.0
    """The seconds until a departure is believed that the member neither signed nor announced over
    its own link. The member can refute it until then."""
    claim_s: float = 30.0
    """The age of this start, in seconds, before one peer's unsigned claim of a later start makes
    the member start again. The claim of most peers does so at once. It is below `leave_s`, in which
    a member can refute its departure."""
    filters_max: int = ANNOUNCED_MAX
    degree_min: int = 2
    """The number of links below which a member dials others without the manager."""
    dial_every_s: float = 1.0
    dial_every_max_s: float = 2.0
    """The longest seconds between attempts. It is low because it bounds how long a healed network
    partition goes unnoticed."""
    repair_close_s: float = 10.0
    """The seconds with all desired links up after which the member closes its own repairs."""
    window_messages: int = 256
    """The most messages in flight to one destination alone."""
    window_bytes: int = 1 << 20
    shared_window_messages: int = 2048
    """The same including messages that go along with other destinations' copies. It also bounds
    the messages that a destination keeps ahead of their turn."""
    shared_window_bytes: int = 4 << 20
    retry_s: float = 1.0
    """The seconds without a confirmation until a retransmission, unless confirmations of this
    destination take longer. Each one doubles it, up to `retry_max_s`."""
    retry_max_s: float = 8.0
    reroute_s: float = 0.05
    """The same when the path has changed, and for `retry_s` after that: members on the new path may
    not have received the graph yet."""
    queue_messages_max: int = 100_000
    """The most messages in custody for one destination. Beyond it the oldest are dropped."""
    queue_bytes_max: int = 256 << 20
    custody_bytes_max: int = 1 << 30
    """The most bytes in custody for all destinations together. Beyond it the oldest messages of the
    longest queue are dropped."""
    queue_age_max_s: float = 86_400.0
    ack_delay_s: float = 0.02
    ack_messages: int = 64
    """The number of stored messages that are confirmed without delay."""
    tidy_s: float = 1.0
    redundancy: int = 1
    """The number of paths by which a message is sent at once, as disjoint as the graph allows; at
    most PATHS_MAX."""
    group_reassign_s: float = 30.0
    """The seconds after which an unreachable member forfeits its shared groups' messages to another
    member. Messages that it already has are then delivered twice."""
    retained_messages_max: int = 100_000
    retained_bytes_max: int = 256 << 20
    """The most bytes of all retained messages together. A topic beyond it is not kept."""
    tombstone_s: float = 86_400.0
    """The seconds for which a tombstone is kept. A member that was away for longer may bring the
    removed message back."""
    unwanted_s: float = 3600.0
    """The seconds for which other members' retained messages are kept without interest here; well
    below `tombstone_s`."""
    retained_check_s: float = 15.0
    """The seconds between comparisons with one member after another. A change causes one at
    once."""
    retained_request_s: float = 1.0
    """The seconds until a request is repeated, at most `retained_requests` times."""
    retained_requests: int = 3
