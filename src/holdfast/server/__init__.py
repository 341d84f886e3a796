"""The process: a broker put together from its data directory, its listeners and its peers.

- Decides: what is opened in which order, what happens beside serving (`maintenance`), what an error
  means for the process (`event_loop.failures`).
- Never: decides what a packet leads to. The pure cores do.
- Invariants: the event loop does not wait for a disk; an unexpected exception stops the process or
  ends one connection, and is never only logged.
- Data: `sockets` -> `event_loop`, one turn per loop iteration -> `disk` and `peers`.
"""
