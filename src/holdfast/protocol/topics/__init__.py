"""Topic names and filters, the subscribers of each filter, and the topics with a retained message.

Pure and shared by the broker and the client, without sessions, packets or the log.
"""
