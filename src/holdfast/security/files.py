"""Replaces a file durably and as a whole: after a crash it has the old content or the new one."""

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def replace_file(
    path: Path, chunks: Iterable[bytes], prepare: Callable[[int], None] | None = None
) -> os.stat_result:
    """Makes or replaces a file, and returns its status. Its mode is 0600, unless `prepare` gives
    its descriptor another mode or owner. Raises `OSError`."""
    # mkstemp sets mode 0600 with any umask.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(chunks)
            file.flush()
            if prepare is not None:
                prepare(descriptor)
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return status
