"""The order of a cluster node's turns, and the rules about a node that is not fit to serve."""
