"""Member's client of the topology manager."""
