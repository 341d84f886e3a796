"""Lets Spark find `format("holdfast")` by itself: it looks for `DefaultSource` in every importable
package whose name begins with `pyspark_`."""

from holdfast_lake.source.source import HoldfastSource as DefaultSource

__all__ = ["DefaultSource"]
