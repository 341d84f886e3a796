"""A process that stores messages of a member until it is killed, and says what it knows.

    python -m tests.support.store_process FILE FIRST

Lines: `asked N`, before a message is stored or at once; `stored N`, as it is told; `removed N`,
before that is asked for; `passed PLACE`, once the position is durable.
"""

import asyncio
import random
import sys
from pathlib import Path

from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.store.file import MemberStoreError, StoreFile
from holdfast_federation.sidecar.store.member_files import StoreFileThread
from holdfast_federation.sidecar.store.store import MemberStore

NODE = b"n" * 16
ORIGIN = b"o" * 16


class Owner:
    def __init__(self) -> None:
        self.stored: list[int] = []

    def on_stored(self, ids: list[MessageId]) -> None:
        for id in ids:
            if id.node == NODE:
                self.stored.append(id.sequence)
                say(f"stored {id.sequence}")
            else:
                say(f"passed {id.sequence}")

    def on_broken(self, error: MemberStoreError) -> None:
        raise error


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def main() -> None:
    path, first = sys.argv[1:]
    owner = Owner()
    store = MemberStore(StoreFileThread(StoreFile(Path(path), NODE)), owner)
    kept = await store.open()
    place = kept.positions.get(ORIGIN, (1, 1))[1]
    rng = random.Random(int(first))
    sequence = int(first)
    while True:
        for _ in range(rng.randint(1, 20)):
            sequence += 1
            say(f"asked {sequence}")
            store.add(MessageId(NODE, 1, sequence), b"%d" % sequence + bytes(rng.randint(0, 5000)))
        if owner.stored and rng.random() < 0.7:
            gone = owner.stored.pop(rng.randrange(len(owner.stored)))
            say(f"removed {gone}")
            store.remove(MessageId(NODE, 1, gone))
        store.pass_to(ORIGIN, (1, place + 1), [MessageId(ORIGIN, 1, place)])
        place += 1
        await asyncio.sleep(rng.choice((0, 0.001)))


if __name__ == "__main__":
    asyncio.run(main())
