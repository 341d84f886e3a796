"""The drivers: sockets, links between nodes, disks and the event loop around a node's core.

- They carry out what the cores decide, and tell them what came of it.
- They never decide the effect of a packet.
- Invariants: the event loop does not wait for a disk. An unexpected exception stops the process or
  ends one connection, and is never only logged (`event_loop.failures`).
- Data flow: `sockets` -> `event_loop`, one turn per loop iteration -> `disk` and `peers`.
  `settings` makes the parts of a node from its configuration.
"""
