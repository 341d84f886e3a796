"""Federations: autonomous brokers at several sites, joined by links.

- `core` decides, as a pure state machine: what a member announces, next hops, custody, order.
- `sidecar` runs a member: links, a store on disk, and an edge to its broker, inside the broker's
  process or beside any MQTT broker.
- `manager` is the REST service that says which members are linked, and repairs the graph.

Never: a relay keeps no messages, and the manager sees none. The invariants are in the packages.
"""

import holdfast  # noqa: F401 - it decides whether compiled modules are loaded
