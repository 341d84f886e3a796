"""Errors of a lake."""


class LakeError(Exception):
    """The lake, or a request to it, is not valid. The text says what is wrong and what to do."""


class CredentialsError(LakeError):
    """The object store refuses the credentials, for example because a token has expired."""


class ObjectStoreError(OSError):
    """The object store has failed, after all repetitions of a request. A later one may succeed."""


class RaceError(Exception):
    """Another driver has recorded the version of a table that this one was about to record.

    The step has no effect, and the next one continues from the other driver's commit.
    """
