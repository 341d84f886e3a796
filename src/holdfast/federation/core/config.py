"""Times and bounds of a member."""

from dataclasses import dataclass

from holdfast.federation.core.routing.interest import ANNOUNCED_MAX
from holdfast.federation.core.routing.link_state import FORGET_S


@dataclass(frozen=True)
class FederationConfig:
    hello_s: float = 2.0
    """Between HELLOs in one direction of a link; so a link costs one a second."""
    ask_after_s: float = 2.05
    """Of silence, until the peer is asked to say something."""
    ask_sooner_s: float = 1.3
    """The same after a message was sent to it, which mostly brings an answer."""
    ask_s: float = 0.2
    asks: int = 3
    """Unanswered ones until the link counts as down: 2.65 s after the last word by default, 1.9 s
    after a message."""
    slow_s: float = 60.0
    """A peer that answered late, after a second ask, is not asked sooner for so long."""
    flaps_free: int = 2
    """Losses of a link within `flap_s` that cost no waiting before it is used again; each further
    one doubles the wait, from 1 s to `hold_max_s`."""
    flap_s: float = 60.0
    hold_max_s: float = 30.0
    relink_s: float = 0.1
    """After its loss a link is not used for so long: members are to hear that it was lost, and with
    it what was on it, before it is back."""
    flood_delay_s: float = 0.01
    """Announcements of so long go in one frame."""
    interest_batch_s: float = 0.1
    """Between announcements of new filters; doubles under churn up to `interest_batch_max_s`."""
    interest_batch_max_s: float = 5.0
    request_every_s: float = 0.25
    """Of the same peer."""
    refresh_s: float = 1800.0
    """Between announcements of a member of which nothing changes."""
    forget_s: float = FORGET_S
    """Without a newer announcement of a member, until it is one no more, and what is queued for it
    is given up. Not below twice `refresh_s`."""
    leave_s: float = 60.0
    """Until it is believed of a member that it has left, where it neither signed that nor said it
    over its own link: it can deny it until then."""
    claim_s: float = 30.0
    """Age of this start before one peer's unsigned word of a later one makes the member start
    again; the word of most peers does at once. Below `leave_s`, in which a member can deny."""
    filters_max: int = ANNOUNCED_MAX
    degree_min: int = 2
    """With fewer links a member dials others on its own."""
    dial_every_s: float = 1.0
    dial_every_max_s: float = 2.0
    """Low, for it bounds how long a healed partition goes unnoticed."""
    settle_s: float = 10.0
    """With all desired links up for so long, those of the member's own repair are closed."""
    window_messages: int = 256
    """In flight to one destination by itself."""
    window_bytes: int = 1 << 20
    shared_window_messages: int = 2048
    """The same with those that went out together with other destinations' and cost no copy of their
    own. A member keeps no more of what comes ahead of its turn."""
    shared_window_bytes: int = 4 << 20
    retry_s: float = 1.0
    """Without a confirmation, until what is in flight is sent again, unless confirmations take
    longer to this destination; doubles to `retry_max_s`."""
    retry_max_s: float = 8.0
    reroute_s: float = 0.05
    """The same when the path has become another, and for `retry_s` after that: members on it may
    not know the graph yet."""
    queue_messages_max: int = 100_000
    """In custody for one destination; beyond it the oldest go."""
    queue_bytes_max: int = 256 << 20
    custody_bytes_max: int = 1 << 30
    """In custody for all destinations together; beyond it the oldest of the longest queue go."""
    queue_age_max_s: float = 86_400.0
    ack_delay_s: float = 0.02
    ack_messages: int = 64
    """Stored ones that are confirmed without delay."""
    tidy_s: float = 1.0
    redundancy: int = 1
    """Paths by which a message is sent at once, as disjoint as there are; at most PATHS_MAX."""
    share_patience_s: float = 30.0
    """A member with a shared group that cannot be reached for so long loses the group's messages to
    another: those that it has already are then delivered twice."""
    retained_messages_max: int = 100_000
    retained_bytes_max: int = 256 << 20
    """Of all retained messages together; of a topic beyond it nothing is held."""
    tombstone_s: float = 86_400.0
    """How long it is known that a retained message was removed. A member that was away for longer
    may bring it back."""
    unwanted_s: float = 3600.0
    """How long what others retained is held without anybody here who wants it; well below
    `tombstone_s`."""
    retained_check_s: float = 15.0
    """Between comparisons with another member, one after the other; those after a change come at
    once."""
    retained_request_s: float = 1.0
    """Until a request is made again, at most `retained_requests` times."""
    retained_requests: int = 3
