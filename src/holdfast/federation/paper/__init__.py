"""The published protocol of self-managed federations (Ribas and Spohn 2022, Bevilaqua and Spohn
2023), as a pure member: for federations that speak it already, and for comparisons with our own.

Subscribers send *beacons* to the federator of their broker. The first federator with one becomes
the *root* of the topic's mesh (the papers' core) and announces itself to everybody, again in every
interval; everybody keeps up to R neighbours nearer to it as *parents*. Who has subscribers, or
others below it, answers its parents, who keep it as a *child*. Publications go to all parents and
children; from outside of the mesh, to the parents. Everything is per topic, and travels as JSON in
messages that federators publish on their neighbours' brokers.

What the published code gets wrong is mended here, in ways that it understands (fields that it
passes over):

- A member hands a message to its subscribers, and passes it on, at most once: it remembers them
  in a window per origin and epoch, not in a cache of the last so many.
- A restarted member is another *epoch*: what it says is new.
- A message makes at most `hops_max` hops, and a mesh is no deeper than half of that, so that
  from any of its members all others can be reached.
- A root hears those who answer it, keeps on while there are any, and gives way only to a root with
  a lower id that announces itself, too. One that has been silent gives way to any.
- While nothing fails nothing is lost, also not while an announcement spreads: until all its copies
  can have come, publications go to the parents of the one before.
- What a member knows of a root ends with it: parents and children go when it expires, and each
  neighbour's part when that neighbour is removed.
- Announcements are never retained, and counted once per hop; those from others than neighbours
  are refused, as is what cannot be read: with a reason, counted, and without further effect.
- Everything that is kept is bounded, and what the bound costs is counted.

Not mended, for it is the protocol: only payloads travel, without QoS, properties or retained
messages; filters with wildcards cannot be expressed; what is published while a mesh forms or heals
is lost; traffic for control grows with the number of topics; whoever may publish on federator/# of
a broker can join in, so brokers should let only federators and the topology manager do that.

Pure: no clock, no I/O, no randomness; `now` is in seconds and never decreases.
"""
