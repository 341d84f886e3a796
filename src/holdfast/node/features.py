"""Names the features that nodes announce to each other in the handshake
(`PeerIdentity.features`). A node uses one once all nodes have announced it."""

from typing import Final

BANS: Final = "bans"
DELAYED_MESSAGES: Final = "delayed-messages"
QUEUES: Final = "queues"
GROUP_MEMBERS: Final = "group-members"
MEMBER_VALUES: Final = "federation-records"
MEMBER_TABLE: Final = "ft"
"""The feature of a node whose configuration has [federation]."""
RETAINED_USERS: Final = "retained-users"
RECORD_FEATURES: Final = (
    *(BANS, DELAYED_MESSAGES, QUEUES, GROUP_MEMBERS, MEMBER_VALUES),
    RETAINED_USERS,
)
"""The features whose records older versions do not apply."""
WILL_OFFSETS: Final = "will-offsets"
"""The feature of entries that older versions do not accept from another node."""
AGREED_USERS: Final = "agreed-users"
AGREED_ACCESS: Final = "agreed-access"
AGREED_GENERATION: Final = "agreed-generation"
GIVES_UP_RECORDS: Final = "gives-up-records"
AGREED_REPLICATION: Final = "resize"
FEEDS: Final = "feeds"
"""The feature of a node that knows gateways, and feeds them."""
AGREED_PLACEMENT: Final = "placement"
"""The features whose entries of the metadata older versions do not know, witnesses included."""
RECORDED_SESSIONS: Final = "recorded-sessions"
"""The feature of a node that begins a session from its own replicated state."""
SHARED_USAGE: Final = "shared-usage"
"""The feature of a node that counts what the other processes of its machine report."""
RELAYED_LINKS: Final = "relayed-links"
"""The feature of a node that relays frames of two others, and has links through others."""
COMPARED_MARKS: Final = "compared-marks"
"""The feature of a leader that compares the mark of a fed node with the epochs of its log."""
