"""Routes of the admin port about clients, topics, messages and the log."""
