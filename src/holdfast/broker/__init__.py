"""One broker as a pure core: sessions, routing, delivery and limits over the journal.

- Decides: what each packet of a client leads to. State is `state.NodeState`; behaviour is functions
  over it, in modules named for their subject.
- Never: does I/O, reads a clock, knows how records are replicated.
- Invariants: no promise leaves before its record is committed; no message reaches a client that may
  not read it (`rights`); what a client can make the broker keep is bounded.
- Data: `Node.handle_data` -> `connections` or `publish` -> the journal and a `Held` promise ->
  commit -> `delivery` -> `Connection.out`. The driver carries out `NodeState.effects`,
  `Connection.out` and the journal's next write group.
"""
