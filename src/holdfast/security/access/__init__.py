"""Users, tokens and sessions of the admin port, and the scopes that they have."""
