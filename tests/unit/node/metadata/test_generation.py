"""The one generation of a cluster's log after nodes were restored."""

from itertools import product

import pytest
from msgspec.structs import replace

from holdfast.node.metadata.codec import (
    decode_command,
    decode_metadata,
    encode_command,
    encode_metadata,
)
from holdfast.node.metadata.commands import (
    GiveUpRecords,
    InitCluster,
    PutGeneration,
    apply,
)
from holdfast.node.metadata.generation import ACCEPTED, mark_in, review, word_of
from holdfast.node.metadata.model import AgreedGeneration, ClusterMetadata, NodeInfo

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


def test_an_accepted_copy_needs_no_majority_of_copies() -> None:
    """Only one of three voters was put back, and what it lacks is lost by an operator's word."""
    mark = 11 | ACCEPTED
    proposal = review("a", mark, features(""), {"b"}, metadata()).proposal
    assert proposal == PutGeneration(0, mark, (mark,))
    state = apply(metadata(), proposal).metadata
    assert state is not None
    assert review("a", mark, features(""), {"b"}, state).is_answered
    assert mark_in(word_of(mark)) == mark


@pytest.mark.parametrize("others", ["", "b"])
def test_half_of_the_voters_was_put_back(others: str) -> None:
    """Otherwise nobody would ever decide, because neither half is a majority."""
    found = review("a", 11, features("a"), set(others), metadata("a", "b"))
    assert found.proposal == PutGeneration(0, 11, (11,))
    assert not found.is_answered


def test_records_that_are_given_up_end_the_generation() -> None:
    """The marks that were answered stay answered. What is refused changes nothing."""
    state = replace(metadata(), generation=AgreedGeneration(7, (11,)))
    before = state.partitions[0]
    command = GiveUpRecords(((0, before.version, replace(before, leader="", in_sync=())),), 9)
    applied = apply(state, decode_command(encode_command(command)))
    assert not applied.error
    assert applied.metadata is not None
    assert applied.changed_partitions == (0,)
    assert applied.metadata.partitions[0].in_sync == ()
    assert applied.metadata.generation == AgreedGeneration(9, (11,))
    assert apply(applied.metadata, command).metadata is applied.metadata
    assert apply(state, GiveUpRecords((), 9)).error


def test_words() -> None:
    assert [mark_in(each) for each in ("", "bans", "bans,restored-1f", "restored-zz")] == [
        0,
        0,
        31,
        0,
    ]
    assert word_of(0) == ""
