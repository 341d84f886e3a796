"""Errors of an import."""


class ImportFailed(Exception):
    """The import cannot go on. The text says where, what is wrong, and what was imported."""


class BadRow(ValueError):
    """A row of a file that can be no message. The text says why."""
