"""Speaks the published protocol of self-managed federations (Ribas and Spohn 2022, Bevilaqua and
Spohn 2023), as a pure member: for federations that speak it already, and for comparisons with our
own.

Subscribers send *beacons* to the federator of their broker. The first federator with one becomes
the *root* of the topic's mesh (the papers' core) and announces itself to everybody, again in every
interval. Each member keeps up to R neighbours nearer to the root as *parents*. A member with
subscribers, or with other members below it, replies to its parents, and they keep it as a *child*.
Publications go to all parents and children; from outside of the mesh, to the parents. Everything is
per topic, and travels as JSON in messages that federators publish on their neighbours' brokers.

The defects of the published code are mended here, by fields that it ignores:

- A member delivers a message to its subscribers, and forwards it, at most once. It remembers
  messages in a window per origin and epoch, not in a cache of the last N.
- A restarted member has another *epoch*, so its messages count as new.
- A message makes at most `hops_max` hops, and a mesh is at most half as deep. So each of its
  members can reach all others.
- A root receives the replies to its announcements, and continues while there are any. It gives way
  only to a root with a lower id that announces itself as well. A silent root gives way to any.
- While nothing fails, no message is lost, even while an announcement spreads. Until all copies of
  the announcement can have arrived, publications go to the parents of the one before.
- The state of a root ends with the root: its parents and children are removed when it expires, and
  each neighbour's part when that neighbour is removed.
- Announcements are never retained, and are counted once per hop. Those that do not come from a
  neighbour are refused, and so are malformed ones: with a reason, counted, without another effect.
- All state is bounded, and each loss by a bound is counted.

These limits are the protocol's own, and remain. Only payloads travel, without QoS, properties or
retained messages. Filters with wildcards cannot be expressed. A message that is published while a
mesh forms or heals is lost. Control traffic grows with the number of topics. A client that may
publish on federator/# of a broker can join, so brokers should grant that to federators and the
topology manager only.

Pure: no clock, no I/O, no randomness; `now` is in seconds and never decreases.
"""
