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
- Nothing is confirmed before its destination stored it. What is sent before its origin stored it is
  not promised by that, and is known again, or does no harm, when it is handed over a second time.
- At every hop the destinations of a message are divided, never multiplied, and a hop costs one
  of at most HOPS_MAX: a loop, possible only while databases differ, ends and never branches.
- What came in is never sent out again as new; `$` topics and federator/# never leave.
- Of the retained messages of a topic the newest version wins, at every member that wants the topic;
  a replay carries its version, and is no publication. What was removed does not come back, unless
  with a member that was away for longer than `tombstone_s`.
- Of a shared group one member's clients get a message. While databases differ or members are lost
  it may be two members'; at QoS 1 and 2 it is not none's, as long as a member but the origin has
  the group.
- By how many paths a message is sent does not show: it is delivered once.
- What a link's policy holds back goes no further there, and holds nothing else up. No peer can make
  a member keep more than its bounds, nor take the room that is another's.
- A peer is believed what it can know (`provenance`): what comes over a path that leads past it, and
  announcements of itself, or signed by their member. So a member that is not between two others
  cannot lose or delay what they send each other.
- A restart is a new epoch: newer than everything said before it, never a duplicate of it.
- Traffic for control depends on links and changes, not on the number of topics.
- Everything that waits is bounded, and what the bound costs is counted.

Pure: no clock, no I/O, no randomness; `now` is in seconds and never decreases.
"""
