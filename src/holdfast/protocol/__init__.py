"""Protocols on the wire: MQTT packets, topic names and filters, WebSocket frames.

Both ends of a connection use these packages, so they depend on neither broker nor client.

- Decides: which bytes are which packet, which topics are valid, which filter matches which topic.
- Never: keeps state of a client, reads a clock, does I/O.
- Invariant: whatever a peer sends, a decoder returns a packet or raises the error of its package.
- Data: bytes -> `websocket` (where used) -> `mqtt.framing` -> `mqtt.publish` or `mqtt.decode`, and
  back through `mqtt.encode`; `topics` finds the subscribers and retained messages of a topic.
"""
