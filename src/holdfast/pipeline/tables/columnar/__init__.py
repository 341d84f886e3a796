"""Reads messages with the same fields by columns, in place of one by one."""
