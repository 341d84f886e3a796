"""Decides for a federation member: routing, custody, delivery and retained messages.

Every member floods an *announcement* of its links and its interest. So every member knows the
graph and computes next hops; nothing is announced per topic. A message names its destinations,
with a place in the *stream* from its origin to each of them. It travels along shortest paths, once
per link while paths are shared. It stays in its origin's custody until each destination has
confirmed its place. Relays store nothing.

Invariants:

- A message of QoS 1 or 2 that its origin stored reaches every member that the origin then knew to
  be interested, whatever relays and links die. Otherwise the origin reports the loss (`Dropped`).
- A member delivers a stream in order and each place once, as long as its position survives. So
  the order per (origin, topic) holds, and QoS 2 is exactly once.
- A destination confirms a message only after it has stored it. An origin that sends before it has
  stored promises nothing: a second handover of that message is detected or harmless.
- Every hop divides the destinations of a message and never multiplies them, and a message makes at
  most HOPS_MAX hops. A loop, possible only while databases differ, ends and never branches.
- A message from the federation is never published again; `$` topics and federator/# never leave.
- The newest retained version of a topic wins at every member that is interested in the topic. A
  replay carries its version and is no publication. A removed message does not come back, unless
  with a member that was away for longer than `tombstone_s`.
- The clients of one member receive a shared group's message. While databases differ or members are
  lost, two members' clients may receive it. At QoS 1 and 2 at least one member's clients do, as
  long as a member other than the origin has the group.
- A message is delivered once, whatever the number of paths by which it is sent.
- A message that a link's policy withholds stops at that link and delays no other message. No peer
  can make a member store more than its bounds, or take the room of another.
- A member believes a peer only where the peer is in a position to know (`provenance`): frames on a
  path through the peer, its own announcements, and signed ones. So a member that is not between two
  others cannot lose or delay their messages.
- A restart begins a new epoch. It is newer than everything before it, never a duplicate of it.
- Control traffic depends on the number of links and changes, not on the number of topics.
- Every queue is bounded, and every message that a bound costs is counted.

The package is pure: no clock, no I/O, no randomness. `now` is in seconds and never decreases.
"""
