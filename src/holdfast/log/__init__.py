"""The log: record batches in the segments of one journal, and readers of it.

- Decides: the layout on disk (`record`, `files.layout`), offsets and watermarks (`journal`), the
  state of a journal after a crash (`journal.recovery`), which segments may be deleted
  (`journal.retention`).
- Never: knows MQTT, sessions or nodes. Only `files` touches the operating system.
- Invariants: offsets of a partition are dense; a batch counts completely or not at all; a
  record below the high watermark never changes; what counts after a restart is on the disk.
- Data: `Journal.append` -> open batches -> `Journal.close_write_group`, a write group -> the driver
  writes and syncs it -> `Journal.commit`, which advances the high watermarks -> `reading.cursor`.
"""
