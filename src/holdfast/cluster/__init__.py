"""A node of a cluster as a pure core: one log, replicated.

- Decides: the leader and the in-sync set of each partition, and which nodes are down. It also
  decides the owner of each session, and the node for each record of a shared group.
- Never: does I/O or reads a clock. `node.ClusterNode` takes frames, results and times, and collects
  what the drivers carry out. The packages `raft` to `placement` and `frame_kinds` know nothing of
  MQTT.
- Invariants: a record is committed when every in-sync replica has it on disk. An epoch has one
  leader. A session has at most one owner that its home partition accepts records from.
- Data: `broker_port` -> `publish.forwarding` -> the partition's leader: `publish.admission`, the
  journal, `partitions.leader` -> followers -> commit -> `publish.apply` -> `state.replicated` and
  connected subscribers -> `publish.promises`, which sends the acknowledgement to the client.
"""
