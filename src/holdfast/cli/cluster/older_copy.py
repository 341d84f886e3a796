"""`holdfast cluster accept-older-copy`: the operator's decision to lose what a disk lacks."""

import argparse
import secrets
import sys
from pathlib import Path

from holdfast.io.disk.older_copy import accept, reason_apart
from holdfast.log.files.data_directory import DataDirectoryError, DirectoryLock, open_to_read
from holdfast.log.files.filesystem import OsFileSystem
from holdfast.log.files.layout import GENERATION_BITS, LOCK


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "accept-older-copy",
        help="let a stopped node go on with a disk that the others have rejected",
    )
    parser.description = (
        "Let a stopped node take part again although the other nodes have rejected its disk as an"
        " older copy. Put the newer disk back instead, or start a majority without it, if you can."
    )
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="data directory")
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="you know that messages that this disk lacks may be lost for good",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NODE",
        help="a node that never comes back; the start waits for all others (repeatable)",
    )


def run(args: argparse.Namespace) -> int:
    """Accepts the copy. Returns 1 without `--accept-loss`, and if that is impossible."""
    root: Path = args.data
    try:
        open_to_read(root)
        if not args.accept_loss:
            reason = reason_apart(OsFileSystem(root))
            if reason:
                print(
                    f"holdfast: the disk was rejected: {reason}. Put the newer disk back, or start"
                    " a majority of the other nodes. To go on with this disk and lose what no other"
                    " node has, give --accept-loss",
                    file=sys.stderr,
                )
                return 1
        else:
            lock = DirectoryLock(root / LOCK)
            try:
                mark = secrets.randbits(GENERATION_BITS)
                reason = accept(OsFileSystem(root), root, mark, args.without)
            finally:
                lock.release()
    except (OSError, DataDirectoryError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    if reason:
        print(f"{root} was rejected: {reason}")
        print("accepted: after its next start the node waits for the others, then takes part")
    else:
        print(f"{root} was not rejected, or takes part again already")
    return 0
