"""MQTT 3.1, 3.1.1 and 5.0 on the wire: bytes to packets and back, for both ends of a connection.

Pure functions over bytes: no I/O, no clock, no state but FrameReader's unread input. `version`
is always the protocol level of CONNECT: 3 for MQTT 3.1, 4 for 3.1.1, 5 for 5.0. Decoders raise
errors.ProtocolViolation and nothing else on what a peer sends; encoders raise ValueError on what
has no encoding. Topic names and filters are bytes and text here; what is valid in them is the
business of `topics`. Callers import the modules.
"""
