"""A node as a pure core: MQTT over one replicated log.

- Decides: the effect of each packet that a client sends, the leader and the in-sync set of each
  partition, which nodes are down, the owner of each session, and the node and the member for each
  record of a shared group.
- Never: does I/O or reads a clock. `node.Node` takes the bytes of clients, and
  `cluster_node.ClusterNode` frames, results and times; both collect what the drivers carry out.
  The packages `raft`, `metadata`, `replicate`, `failure`, `placement` and `lease` know nothing of
  MQTT.
- Invariants: no promise is released before its record is committed, which is on the disk of every
  in-sync replica. An epoch has one leader. A session has at most one owner that its home partition
  accepts records from. No client receives a message that it may not read (`rights`). What a client
  can make a node keep is bounded.
- Data: `Node.handle_data` -> `connections` or `publish.inbound`, a record and a `Promise` ->
  `publish.forwarding` -> the partition's leader: `publish.admission`, the journal,
  `replicate.leader` -> followers -> commit -> `publish.apply` -> `state.replicated` and connected
  subscribers -> `publish.promises`, which sends the acknowledgement to the client.
"""
