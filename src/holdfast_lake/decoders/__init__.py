"""Decodes payloads to readings: JSON, CSV, bare values and Sparkplug B. No decoder imports Spark.

A decoder gets the bytes of one message. It returns a `Decoded` (decoded.py) or raises DecodeError.
No payload makes it raise anything else, and its cost is bounded.
"""
