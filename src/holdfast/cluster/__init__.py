"""A node of a cluster: its broker (node/), the replicated partitions and the agreed metadata
(replication/) put together. Pure: `member.Member` takes frames, times and results, and collects
what the drivers shall carry out.

`promises` keeps promises to clients in order, `forwarding` brings records to the leaders of their
partitions, `admission` is the leader's side of that, `applying` takes committed records into the
images of sessions and to live receivers, `homes` decides at a session's home partition who owns it,
`opening` asks for that, `interest` spreads QoS 0, `groups` runs shared subscriptions.
`transfer` gets the images of partitions whose log begins behind records that are gone, from nodes
that have them; `image_entries` is what they are made of on the way.
"""
