"""The one generation of a cluster's log after nodes were restored."""

from itertools import product

import pytest
from msgspec.structs import replace

from holdfast.cluster.metadata.codec import (
    decode_command,
    decode_metadata,
    encode_command,
    encode_metadata,
)
from holdfast.cluster.metadata.commands import InitCluster, PutGeneration, apply
from holdfast.cluster.metadata.generation import mark_in, review, word_of
from holdfast.cluster.metadata.model import ClusterMetadata, NodeInfo

MARKS = {"a": 11, "b": 12, "c": 13}


def metadata(*voters: str) -> ClusterMetadata:
    made = apply(None, InitCluster("c1", 2, 1, 1, NodeInfo("a", "i1", "", "", ""))).metadata
    assert made is not None
    return replace(made, voters=voters or ("a", "b", "c"))


def features(restored: str) -> dict[str, str]:
    return {node: f"x,{word_of(MARKS[node])}" if node in restored else "x" for node in MARKS}


@pytest.mark.parametrize(
    ("restored", "connected"), [*product(["a", "ab", "abc"], ["", "b", "c", "bc"])]
)
def test_a_majority_decides(restored: str, connected: str) -> None:
    found = review("a", 11, features(restored), set(connected), metadata())
    seen = {"a", *connected}
    assert (found.proposal is not None) == (len(seen & set(restored)) >= 2)
    assert found.is_answered == (len(seen - set(restored)) >= 2)


def test_one_generation_for_all_of_a_restored_cluster() -> None:
    """All propose; one wins. A node that starts later has its mark in it, or follows."""
    state = metadata()
    agreed = 0
    for node in MARKS:
        others = set(MARKS) - {node}
        found = review(node, MARKS[node], features("abc"), others, state)
        if found.proposal is not None:
            command = decode_command(encode_command(found.proposal))
            applied = apply(state, command)
            assert not applied.error
            assert applied.metadata is not None
            state, agreed = applied.metadata, agreed + 1
            assert apply(state, command).error == "the log has generation 11, not 0"
        assert review(node, MARKS[node], features("abc"), others, state).is_answered
    assert agreed == 1
    assert state.generation is not None
    assert state.generation.restored == (11, 12, 13)
    assert decode_metadata(encode_metadata(state)) == state


def test_a_node_that_starts_after_the_agreement_takes_it() -> None:
    first = review("a", 11, features("abc"), {"b"}, metadata()).proposal
    assert first == PutGeneration(0, 11, (11, 12))
    state = apply(metadata(), first).metadata
    assert state is not None
    # The features of the others are those of their connection, which still has the marks.
    assert review("c", 13, features("abc"), {"a", "b"}, state).is_answered
    # Put back once more, all of them, with other marks.
    again = review("a", 21, {"b": word_of(22), "c": word_of(23)}, {"b", "c"}, state).proposal
    assert again == PutGeneration(11, 21, (21, 22, 23))


def test_the_only_voter_decides() -> None:
    assert review("a", 11, features("a"), {"b"}, metadata("a")).proposal is not None
    assert review("b", 12, features("b"), {"a"}, metadata("a")).is_answered
    assert review("b", 12, features("ab"), {"a"}, metadata("a")).proposal is not None


def test_words() -> None:
    assert [mark_in(each) for each in ("", "bans", "bans,restored-1f", "restored-zz")] == [
        0,
        0,
        31,
        0,
    ]
    assert word_of(0) == ""
