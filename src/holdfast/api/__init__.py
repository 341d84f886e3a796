"""The admin port: health, metrics, and the log for readers over the network."""
