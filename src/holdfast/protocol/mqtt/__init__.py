"""MQTT 3.1, 3.1.1 and 5.0 on the wire: bytes to packets and back, for both ends of a connection.

Pure functions over bytes: no I/O, no clock, no state except the unread input of FrameReader.
`version` is always the protocol level of CONNECT: 3 for MQTT 3.1, 4 for 3.1.1, 5 for 5.0. On input
from a peer, decoders raise errors.ProtocolViolation and no other error. Encoders raise `ValueError`
for a packet without encoding. Topic names and filters are bytes and text here; `topics` checks
their content. Callers import the modules.
"""
