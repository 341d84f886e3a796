"""Lakes in object stores: their names, the check of a store, and reading from it."""
