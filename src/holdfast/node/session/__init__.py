"""One client's protocol state: limits, inflight messages, cursor, outbox.

Pure: no clock, no socket, no access to the log. A packet id is in use exactly while it is a key of
`Session.inflight`.
"""
