"""A whole cluster in one thread: the production cores of its nodes, with a clock, a network, disks
and clients that a seed decides about, and checkers that watch all of them.

`schedule` is the clock, `network` the links between nodes, `disk` the disks, `host` the machine of
a node. `process` drives the production turns (`holdfast.node.runtime`) over its `cores`; its
ports are in `process`, its event `loop`, `links`, `reads` and `storing`. `client` and `sockets` are
the MQTT clients; `workload`, `whispers`, `timed` and `teams` what they do, by `casts`. `faults` and
`operating` are what happens to the nodes, `checks`, `mirror` and `story` what must hold. `world`
puts a run together, `plans` says what a seed's is like. `python -m tests.sim --seed N` runs one.

The same seed gives the same run, in any process: randomness comes from streams that are named after
the seed and their use, so what happens at one place does not shift what happens at others.
"""
