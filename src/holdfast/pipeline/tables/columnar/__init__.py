"""Messages that look alike, read by columns instead of one by one."""
