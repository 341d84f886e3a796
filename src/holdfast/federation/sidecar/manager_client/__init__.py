"""A member's side of the topology manager: join, report, follow its changes."""
