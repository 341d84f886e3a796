"""Computes CRC-32 for readers, with zlib-ng if it is there: they check every byte."""

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32
