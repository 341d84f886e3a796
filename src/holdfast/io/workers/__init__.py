"""Processes that hold the sockets of clients, beside the broker's own.

A worker accepts connections and speaks TLS, WebSocket and the PROXY protocol. It passes the bytes
of all its clients on to the broker in batches, over one stream (`holdfast.protocol.relay`), and
back. All state of MQTT stays in the broker: to the node a client behind a worker is a connection
like any other, so limits, keep alive and takeover are the same.

- `pool`: starts and replaces workers, and gives them the listeners' sockets (broker).
- `channel`: the stream to one worker, and a transport for each of its clients (broker).
- `worker`, `reception`, `relays`: the process, its listeners, and its side of the stream.

Invariants
- What a client sent before it closed its connection reaches the node before the end does.
- Each direction of each connection has at most `WINDOW_BYTES` and one write on its way, so a client
  that does not read slows its publishers down as it does without workers.
- Frames of connections that come and go, and log lines, have a window of their own. While it is
  full, a worker closes new sockets: otherwise strangers could fill its memory beside a broker that
  is stopped.
- A worker that ends takes its own clients along, and no other. A broker that ends takes its workers
  along: their stream ends.
"""
