"""Converts a single broker's data directory into that of the first node of a cluster.

The old directory is only read. The new one gets its name when it is complete and checked.
"""

from pathlib import Path
from re import fullmatch
from typing import Final

from holdfast.cli.backup.backup import LEFT_OUT, Copied
from holdfast.cli.backup.new_directory import NewDirectory, NotEmpty
from holdfast.config.check_cluster import NODE_ID
from holdfast.io.conversion.conversion import (
    MADE_AGAIN,
    ClusterPlan,
    Conversion,
    fill,
)
from holdfast.io.conversion.source import ConversionError, Source
from holdfast.log.files.data_directory import lock_root, open_to_read
from holdfast.log.files.filesystem import TEMPORARY, OsFileSystem
from holdfast.log.files.layout import BEFORE_ADOPTION
from holdfast.log.journal.epoch_folders import EPOCHS, LEASE
from holdfast.node.session.session import FEDERATION

PARTIAL: Final = ".converting"
"""The end of the name of a directory that is not complete yet."""


def convert(source: Path, target: Path, plan: ClusterPlan, node_id: str = "") -> Conversion:
    """Convert the directory of a broker without others for the first node of a cluster. `node_id`:
    the new name; "" for the same.

    Raises `ConversionError`, which says what to do, `DataDirectoryError` or `OSError`.
    """
    directory = open_to_read(source)
    if (source / LEASE).exists():
        raise ConversionError(f"{source} is the shared directory of a pair, which is not converted")
    if not fullmatch(NODE_ID, node_id or directory.manifest.node_id):
        name = node_id or directory.manifest.node_id
        raise ConversionError(f"--node-id {name!r}: give 1 to 32 of A-Z a-z 0-9 _ -")
    if target.absolute().resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"{target} is inside {source}: give a directory outside of it")
    try:
        made = NewDirectory(target, PARTIAL)
    except NotEmpty as error:
        raise ConversionError(str(error)) from None
    lock = lock_root(source)
    try:
        opened = Source(source, directory)
        if directory.manifest.is_replica:
            opened.check_alone()
        elif FEDERATION in opened.recovery.state.sessions:
            raise ConversionError(
                f"{source} is a member of a federation, and its log has messages for the others."
                " Wait until `holdfast federation status` shows none in custody, take [federation]"
                " out, and start and stop the broker once"
            )
        _check_space(opened, made.partial)
        with made as partial:
            partial.mkdir(mode=0o750, parents=True)
            _copy_others(source, partial)
            return fill(opened, partial, plan, node_id)
    finally:
        lock.release()


def _check_space(source: Source, partial: Path) -> None:
    folder = next(each for each in partial.parents if each.exists())
    free_bytes, wanted = OsFileSystem(folder).free_bytes(), source.size_bytes
    if free_bytes < wanted:
        raise ConversionError(
            f"{folder} has {free_bytes} bytes free, and the new directory needs about {wanted}"
        )


def _copy_others(source: Path, root: Path) -> None:
    """Copy what both kinds of nodes have: users, the index of the audit, quarantine, and files of a
    federation."""
    copied = Copied(source, root)
    for path in sorted(source.rglob("*")):
        name = str(path.relative_to(source))
        is_made_again = name.partition("/")[0] in (*MADE_AGAIN, LEASE, EPOCHS, BEFORE_ADOPTION)
        if is_made_again or name in LEFT_OUT or name.endswith(TEMPORARY) or not path.is_file():
            continue
        if name.endswith(".db"):
            copied.copy_database(name)
        elif not name.endswith((".db-wal", ".db-shm", ".db-journal")):
            copied.copy(name)
    copied.finish()
