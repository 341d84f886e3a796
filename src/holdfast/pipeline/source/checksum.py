"""CRC-32 as batches have it, by zlib-ng where that is installed: up to ten times as fast as zlib,
and every byte that is read needs it."""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
