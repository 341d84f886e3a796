from hypothesis import given
from hypothesis import strategies as st

from holdfast.log.journal.active_index import PIECE, sorted_in_pieces


@given(st.integers(1, 3), st.integers(0, 1 << 30), st.sampled_from([b"%d", b"same", b"a/%d/b"]))
def test_sorts(pieces: int, seed: int, pattern: bytes) -> None:
    values = []
    for number in range(pieces * PIECE + seed % 100):
        seed = (seed * 1103515245 + 12345) % (1 << 31)
        values.append(pattern.replace(b"%d", b"%d" % (seed % (number + 1))))
    assert sorted_in_pieces(values) == sorted(values)


def test_nothing() -> None:
    assert sorted_in_pieces([]) == []
