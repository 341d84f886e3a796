"""`holdfast convert`: a data directory of one broker as that of a cluster's node, and back."""
