"""CRC-32 of batches, by zlib-ng if it is installed.

zlib-ng is up to ten times as fast as zlib, and every byte that is read passes through it.
"""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
