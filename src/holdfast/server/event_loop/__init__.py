"""The asyncio edges: sockets, the journal's disk, timers. They decide nothing."""
