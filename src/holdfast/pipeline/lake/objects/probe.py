"""Checks that an object store keeps what the commits of a lake need of it.

1. An object that was written is read back and listed.
2. An object is created only if there is none, also by several writers at once.

A store that lacks the second is refused. Counter-example: OpenStack Swift checks the condition
before it writes. Two drivers that create the same commit at the same time both succeed, the later
one overwrites the other, and the rows of the first are lost.
"""

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from holdfast.pipeline.lake.files.errors import LakeError, ObjectStoreError
from holdfast.pipeline.lake.files.files import remove_all, remove_tree
from holdfast.pipeline.lake.objects.paths import ObjectPath

PROBES: Final = "_probe"
WRITERS: Final = 8
ROUNDS: Final = 4
LEFT_S: Final = 3600.0
"""The age in seconds from which the objects of a killed probe are removed."""


def check_object_store(lake: ObjectPath) -> None:
    """Checks the store of a lake. Raises LakeError for one that cannot keep a lake."""
    place = lake / PROBES / secrets.token_hex(8)
    try:
        with ThreadPoolExecutor(WRITERS) as writers:
            for number in range(ROUNDS):
                _check_race(place / str(number), writers)
        listed = sorted(each.path.name for each in place.objects())
        if listed != [str(number) for number in range(ROUNDS)]:
            raise LakeError(
                f"the object store of {lake} does not list what was just written: a lake needs a "
                "store that is consistent"
            )
    finally:
        remove_tree(place)
    left = [each.path for each in (lake / PROBES).objects() if each.age_s > LEFT_S]
    if left:
        remove_all(left)


def _check_race(path: ObjectPath, writers: ThreadPoolExecutor) -> None:
    contents = [f"{secrets.token_hex(8)} {number}".encode() for number in range(WRITERS)]

    def create(content: bytes) -> bool:
        try:
            path.create(content)
        except FileExistsError:
            return False
        except ObjectStoreError as error:
            if "501" in str(error) or "NotImplemented" in str(error):
                raise _refusal(path, "refuses If-None-Match") from None
            raise
        return True

    won = [
        content for content, has in zip(contents, writers.map(create, contents), strict=True) if has
    ]
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        there = b""
    if there not in won:
        raise LakeError(
            f"the object store of {path.root} has forgotten or changed an object that it had "
            "acknowledged: it cannot keep a lake"
        )
    if len(won) != 1:
        raise _refusal(path, f"let {len(won)} of {WRITERS} writers create the same object")


def _refusal(path: ObjectPath, why: str) -> LakeError:
    return LakeError(
        f"the object store of {path.root} {why}. A lake needs a store that creates an object "
        "only if there is none (If-None-Match: *), as AWS S3, MinIO, Ceph, Google and Azure do"
    )
