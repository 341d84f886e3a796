"""One broker as a pure core: sessions, routing, delivery and limits over the journal.

- Decides: the effects of each packet that a client sends. State is `state.NodeState`; behaviour is
  functions over it, in modules named for their subject.
- Never: does I/O, reads a clock, depends on how records are replicated.
- Invariants: no promise is released before its record is committed; no client receives a message
  that it may not read (`rights`); the memory that a client can make the broker use is bounded.
- Data: `Node.handle_data` -> `connections` or `publish` -> the journal and a `Promise` ->
  commit -> `delivery` -> `Connection.out`. The driver carries out `NodeState.effects`,
  `Connection.out` and the journal's next write group.
"""
