"""Files of a table: commits, Parquet writing, compaction."""
