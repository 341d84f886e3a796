"""The admin port: health, readiness, metrics, cluster and federation, the log over HTTP.

- It decides the response to each request, and when a node counts as ready (`readiness`).
- It never changes state without the checks of the core.
- Invariant: no request blocks the event loop. Large reads of the log have threads of their own
  (`log_sender`).
"""
