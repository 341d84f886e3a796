"""Fuzzers of every door of running processes, with a canary client beside them.

    python -m tests.fuzz --seconds 60 [--doors mqtt,websocket,...] [--seed N]

A door is a port that a stranger may reach: MQTT over TCP, TLS and WebSocket, the admin port, the
port between nodes, the port between members of a federation, and the topology manager. Each case is
one connection with bytes that are mutated from good ones, or good packets in an order that no
client sends. What must hold: the process goes on, its log has no traceback,
`holdfast_internal_errors` stays 0, its memory does not grow beyond a bound, and the canary, a good
client of the same process, loses no message and waits for none longer than `CANARY_S`.
"""
