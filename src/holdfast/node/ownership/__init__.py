"""Sessions in a cluster: ownership, its coordinator, acquisition, expiry.

The leader of a session's home partition is its coordinator (`coordinator`), and the nodes report
their sessions to it (`reports`). An owner whose lease has expired (`ownership_lease`) stops
delivering before another node may get the session.
"""
