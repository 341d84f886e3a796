"""The cluster's metadata: nodes, partitions, leaders, epochs and in-sync sets, agreed by Raft.

`model` is the state, `commands` the only function that changes it, and `store` proposes changes.
"""
