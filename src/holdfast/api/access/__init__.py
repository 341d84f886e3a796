"""Access to the admin port: the gate of every request, users and tokens, and the audit."""
