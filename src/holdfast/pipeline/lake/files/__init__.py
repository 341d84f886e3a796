"""The files of a table: commits, Parquet writing, compaction."""
