"""The Spark data source `holdfast`: offsets, planning, reading, decoding to Arrow."""
