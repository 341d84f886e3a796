"""Autonomous brokers, joined by links into one federation: what a member decides.

Every member floods what it is linked with and what its clients want (*announcements*), so everyone
knows the graph and computes next hops; nothing is announced per topic. A message names the members
it is for, with a place in the *stream* from its origin to each of them. It travels along shortest
paths, once per link while paths are shared, and stays in its origin's custody until each of
those has confirmed its place. Relays keep nothing.

Invariants:

- A message of QoS 1 or 2 that was stored at its origin reaches every member that its origin knew to
  be interested then, whatever relays and links die, or its loss is told (`Dropped`).
- A member delivers a stream in order and each place once, as long as its position survives: so
  the order per (origin, topic) holds, and QoS 2 is exactly once.
- Nothing is sent before its origin stored it, nothing is confirmed before its destination did.
- At every hop the destinations of a message are divided, never multiplied, and a hop costs one
  of at most HOPS_MAX: a loop, possible only while databases differ, ends and never branches.
- What came in is never sent out again as new; `$` topics and federator/# never leave.
- A restart is a new epoch: newer than everything said before it, never a duplicate of it.
- Traffic for control depends on links and changes, not on the number of topics.
- Everything that waits is bounded, and what the bound costs is counted.

Pure: no clock, no I/O, no randomness; `now` is in seconds and never decreases.
"""
