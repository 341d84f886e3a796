"""Reads the secret that the nodes of a cluster, or members of a federation, share."""

import stat
from pathlib import Path
from typing import Final

SECRET_CHARACTERS_MIN: Final = 32
"""The least characters of a secret. A node that dials shows a proof of the secret to whatever
process accepts, and a short secret could be guessed from it."""
SECRET_BYTES_MAX: Final = 4096
HOW: Final = "make one with: (umask 077; openssl rand -hex 32 > {path})"
"""The command that makes a secret, for error texts."""


class SecretError(ValueError):
    """A secret that cannot be used. The text has the file and the remedy."""


def read_secret(path: Path) -> bytes:
    """The secret without the white space around it. Raises `SecretError`.

    The file must not be readable by others nor writable by its group. A group may read it, because
    secrets mounted into containers have that mode.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            text = file.read(SECRET_BYTES_MAX + 1)
    except FileNotFoundError:
        raise SecretError(
            f"{path}: there is no such file; {HOW.format(path=path)} and give everybody the same"
        ) from None
    except OSError as error:
        raise SecretError(f"{path}: cannot read the shared secret: {error.strerror}") from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise SecretError(
            f"{path}: the shared secret is open to others (mode {mode:04o}): chmod 600 {path}, or"
            " 640 if its group is the broker's alone, as in a container"
        )
    if len(text) > SECRET_BYTES_MAX:
        raise SecretError(f"{path}: the shared secret has more than {SECRET_BYTES_MAX} bytes")
    secret = text.strip()
    if len(secret) < SECRET_CHARACTERS_MIN:
        raise SecretError(
            f"{path}: the shared secret has {len(secret)} characters, it needs"
            f" {SECRET_CHARACTERS_MIN}; {HOW.format(path=path)}"
        )
    return secret
