"""Payloads to readings: JSON, CSV, bare values and Sparkplug B. Knows no Spark.

A decoder gets the bytes of one message and returns a `Decoded` (decoded.py) or raises DecodeError;
nothing a payload contains makes it raise anything else, and what it costs is bounded.
"""
