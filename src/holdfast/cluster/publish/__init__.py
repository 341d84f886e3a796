"""The path of a publish through a cluster: forwarding, admission, commit, promise."""
