"""`holdfast cluster`: nodes on this machine, and requests to the admin port of any node."""
