"""Figures of the published studies, to stand beside ours.

Sources: "failover" is the study of an ActiveMQ pair on Raspberry Pi 3 with NFS; "queue" the Publish
Queue client; "core" the broker with its last 100 messages a topic; "federation" the self-managed
federation with dynamic topology control.
"""

from typing import Final

ACTIVEMQ_DOWNTIMES_S: Final = (24.086, 24.102, 20.936, 26.442, 26.067)
"""Failover, Table 1: five planned stops."""
ACTIVEMQ_LOST: Final = tuple(range(25, 45))
"""Failover, Figure 6: the seconds whose message was lost."""
ACTIVEMQ_LATENCY_S: Final = (1.1763, 0.1157)
"""Failover: the mean latency of publishers and of subscribers, over 20 to 100 clients."""
QUEUE_FASTER: Final = 2.0
"""Queue, Figure 5: about how many times as fast as QoS 2."""
CLIENTS: Final = (20, 40, 60, 80, 100)
"""Failover, Figures 4 and 5: the clients."""
LOAD_CLIENTS: Final = (0, 100, 1000, 10_000)
"""Core: 0, 100 and 1,000 clients; 10,000 are ours."""
FEDERATION_MEANS_MS: Final = {0: 445.796, 5: 1062.230}
"""Federation, Table 1: the mean latency of 1,000 messages of 64 bytes, by the subscriber's
broker."""
FEDERATION_NEIGHBOURS: Final = (1, 3)
"""Federation, Figure 12: the new neighbours of member 8."""
