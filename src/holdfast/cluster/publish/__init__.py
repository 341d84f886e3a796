"""A publish on its way through a cluster: forwarding, admission, commit, promise."""
