"""The parts of a node made from its configuration and its security files."""
