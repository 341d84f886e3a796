"""Decides the generation of a cluster's log after nodes were restored.

A restore gives each replica a random number of its own, its mark, which its handshake carries. The
cluster has one generation, in the metadata. Which disks were put back decides about it:

- A majority of the voters carries a mark: the cluster was put back. The nodes agree on a new
  generation, which names the marks that it answers.
- A majority of the voters carries none: the cluster has gone on. A restored node that is connected
  takes its generation.
- An operator has accepted the loss of what a disk lacks (`ACCEPTED` is in its mark): the nodes
  agree on a new generation, however many disks were put back.

A node whose mark is not answered does not tell the offsets of its log. Smallest counter-example
without the marks in the metadata: A and B are restored and agree on generation 7. C, restored with
them, starts later. It would ask for another one, and readers of generation 7 would be refused.
"""

from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from holdfast.log.files.layout import GENERATION_BITS
from holdfast.node.metadata.commands import PutGeneration
from holdfast.node.metadata.model import NODES_MAX, NOT_RESTORED, ClusterMetadata

WORD: Final = "restored-"
"""The beginning of the word in `PeerIdentity.features` that has a node's mark, in hex."""
ACCEPTED: Final = 1 << GENERATION_BITS
"""The bit in a mark that says that an operator has accepted the loss of what the disk lacks."""


class GenerationReview(Struct, frozen=True):
    """The decision of a restored node about its mark."""

    is_answered: bool = False
    """Whether the generation in the metadata is that of its log."""
    proposal: PutGeneration | None = None


def word_of(mark: int) -> str:
    """The word for a mark, or "" without one."""
    return f"{WORD}{mark:x}" if mark else ""


def mark_in(features: str) -> int:
    """The mark in the features of a node; 0: it has none."""
    for word in features.split(","):
        if word.startswith(WORD):
            try:
                return int(word[len(WORD) :], 16)
            except ValueError:
                return 0
    return 0


def review(
    node: str, mark: int, features: Mapping[str, str], connected: Collection[str],
    metadata: ClusterMetadata,
) -> GenerationReview:  # fmt: skip
    """Reviews the mark of this node. `features`: those of the other nodes."""
    agreed = metadata.generation or NOT_RESTORED
    if mark in agreed.restored:
        return GenerationReview(is_answered=True)
    marks = {other: mark_in(features.get(other, "")) for other in connected} | {node: mark}
    marks = {other: each * (each not in agreed.restored) for other, each in marks.items()}
    majority = len(metadata.voters) // 2 + 1
    voting = [marks[voter] for voter in metadata.voters if voter in marks]
    # With an even number of voters, half of them may be put back.
    if mark & ACCEPTED or sum(each > 0 for each in voting) > len(metadata.voters) - majority:
        answered = tuple(sorted({each for each in marks.values() if each}))[:NODES_MAX]
        return GenerationReview(proposal=PutGeneration(agreed.number, mark, answered))
    return GenerationReview(is_answered=sum(each == 0 for each in voting) >= majority)
