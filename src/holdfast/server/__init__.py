"""The process: a broker put together from its data directory, its listeners and its peers.

- It decides what is opened in which order, the background work (`maintenance`), and what an error
  means for the process (`event_loop.failures`).
- It never decides the effect of a packet. The pure cores do.
- Invariants: the event loop does not wait for a disk. An unexpected exception stops the process or
  ends one connection, and is never only logged.
- Data flow: `sockets` -> `event_loop`, one turn per loop iteration -> `disk` and `peers`.
"""
