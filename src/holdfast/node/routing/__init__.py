"""Routes of messages to subscribers, on this node and on the others."""
