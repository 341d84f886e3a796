"""Sessions in a cluster: ownership, its coordinator, acquisition, expiry.

The leader of a session's home partition is its coordinator. An owner whose lease has expired
(`ownership_lease`) stops delivering before another node may get the session.
"""
