"""A whole cluster in one thread: the production cores of its nodes, with a clock, a network, disks
and clients that a seed decides about, and checkers that watch all of them.

`schedule` is the clock, `network` the links between nodes, `disk` the disks, `process` a node's
event loop (what drivers/cluster_broker.py is with real ones), `host` the machine it runs on,
`clients` and `workload` the MQTT clients, `faults` what goes wrong, `checks` what must hold,
`world` puts a run together. `python -m holdfast.sim --seed N` runs one.

The same seed gives the same run, in any process: randomness comes from streams that are named after
the seed and their use, so what happens at one place does not shift what happens at others.
"""
