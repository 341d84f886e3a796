"""Commands about clients, topics and messages, over the admin port of any node."""
