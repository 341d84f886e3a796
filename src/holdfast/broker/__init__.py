"""One broker node: sessions, routing, delivery and limits composed over the journal.

Pure. The driver calls `Node` with bytes, times and results, and carries out what the node's state
asks for: bytes in `Connection.out`, `NodeState.effects`, and the journal's next write group.
"""
