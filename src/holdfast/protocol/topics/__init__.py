"""Topic names and filters, who subscribed to what, and which topics hold a retained message.

Pure and shared by the broker and the client; knows nothing of sessions, packets or the log.
"""
