"""`holdfast federation`: the federation of a broker, the sidecar, the topology manager."""
