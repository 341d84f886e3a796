"""The columnar reading of messages with the same fields, in place of one by one."""
