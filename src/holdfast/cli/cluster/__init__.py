"""`holdfast cluster`: nodes on this machine, and commands to the admin port of any node."""
