"""The admin port: health, readiness, metrics, cluster and federation, the log over HTTP.

- Decides: what each request gets, and when a node counts as ready (`readiness`).
- Never: changes state without the core's own checks.
- Invariant: no request holds the event loop; reading much of the log has threads of its own
  (`log_sender`).
"""
