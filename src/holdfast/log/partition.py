"""Maps a key to its partition. The rule is part of the log's format and never changes."""

from zlib import crc32


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a topic (or, for session state, of a client id): CRC-32 modulo count.

    One topic is always in one partition, so its messages have one total order.
    """
    return crc32(key) % partitions
