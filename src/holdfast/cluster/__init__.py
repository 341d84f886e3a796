"""A node of a cluster as a pure core: one log, replicated.

- Decides: who leads a partition and which replicas are in sync, which node is down, which node owns
  a session, which member of a shared group gets a record.
- Never: does I/O or reads a clock. `node.Member` takes frames, results and times, and collects what
  the drivers carry out. The packages `raft` to `placement` and `frame_kinds` know nothing of MQTT.
- Invariants: a record is committed when every in-sync replica has it on disk; an epoch has one
  leader; a session has at most one owner that its home partition accepts records from.
- Data: `broker_port` -> `publish.forwarding` -> the partition's leader: `publish.admission`, the
  journal, `partitions.leader` -> followers -> commit -> `publish.apply` -> `state.replicated` and
  live receivers -> `publish.promises`, which answers the client.
"""
