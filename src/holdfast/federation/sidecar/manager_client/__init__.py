"""The member's client of the topology manager."""
