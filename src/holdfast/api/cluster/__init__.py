"""Routes of the admin port about the past and the future of a cluster."""
