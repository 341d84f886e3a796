"""Many changes of the store against a plain dict: what a statement with many rows, or a span of
sequences, must not get wrong."""

import random
from pathlib import Path

import pytest

from holdfast_federation.core.identity import MessageId
from holdfast_federation.sidecar.store import file as store_file
from holdfast_federation.sidecar.store.file import MemberStoreChange, StoredMember, StoreFile

NODE = b"S" * 16


def message(id: MessageId, number: int) -> bytes:
    return b"%d.%d.%d" % (id.epoch, id.sequence, number)


@pytest.mark.parametrize("rows_max", [1, 2, 7, store_file.ROWS_MAX])
def test_random_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_max: int) -> None:
    monkeypatch.setattr(store_file, "ROWS_MAX", rows_max)
    for seed in range(8):
        choose = random.Random(seed)
        path = tmp_path / f"{seed}.db"
        file = StoreFile(path, NODE)
        kept = file.open()
        custody: dict[MessageId, bytes] = {}
        positions: dict[bytes, tuple[int, int]] = {}
        retained: dict[str, bytes] = {}
        sequence = 0
        for number in range(40):
            change = MemberStoreChange()
            if choose.random() < 0.7:
                for _ in range(choose.choice((1, 3, 250))):
                    # With gaps: what is nobody's has a number, too.
                    sequence += choose.choice((1, 1, 1, 2, 5))
                    id = MessageId(NODE, 1 + number // 20, sequence)
                    change.added[id] = message(id, number)
            if custody and choose.random() < 0.3:
                again = choose.choice(list(custody))
                change.added[again] = message(again, number)
            if custody and choose.random() < 0.6:
                known = sorted(custody, key=lambda id: (id.epoch, id.sequence))
                begin = choose.randrange(len(known))
                count = choose.choice((1, 10, len(known)))
                gone = [id for id in known[begin : begin + count] if choose.random() < 0.9]
                change.removed = set(gone) - change.added.keys()
            for origin in (b"A" * 16, b"B" * 16):
                if choose.random() < 0.5:
                    change.positions[origin] = (1, number + 1)
            for topic in ("a", "b", "c"):
                if choose.random() < 0.4:
                    change.retained[topic] = choose.choice((None, b"%d" % number))
            file.apply(change)
            for id in change.removed:
                custody.pop(id, None)
            custody |= change.added
            positions |= change.positions
            for topic, data in change.retained.items():
                if data is None:
                    retained.pop(topic, None)
                else:
                    retained[topic] = data
            if choose.random() < 0.2:
                file.close()
                file = StoreFile(path, NODE)
                kept = file.open()
                check(kept, custody, positions, retained)
        file.close()


def check(
    kept: StoredMember,
    custody: dict[MessageId, bytes],
    positions: dict[bytes, tuple[int, int]],
    retained: dict[str, bytes],
) -> None:
    in_order = sorted(custody, key=lambda id: (id.epoch, id.sequence))
    assert [data for data, _ in kept.custody] == [custody[id] for id in in_order]
    assert kept.positions == positions
    assert kept.retained == retained
