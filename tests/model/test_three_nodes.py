"""Scripts of chance: to the clients, three nodes are like one."""

import logging

import pytest

from tests.support.seeds import block_of_seeds, run_seeds
from tests.transcripts.seeds import compare_forms, differences

SEEDS = 12
"""The number of scripts of chance that are compared; `tests.model` compares more."""
BLOCKS = 4


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "holdfast")


@pytest.mark.parametrize("block", range(BLOCKS))
def test_three_nodes_are_to_clients_like_one(block: int) -> None:
    run_seeds(block_of_seeds(block, BLOCKS, SEEDS), compare_forms)


def test_a_broker_that_differs_is_found() -> None:
    first = {"a": ['0.1 < PUBLISH 1 q1 t "1"', '0.2 < PUBLISH 2 q1 t "2"', "0.3 < PUBACK 1 16"]}
    same = {"a": ["0.2 < PUBACK 1 16", '0.9 < PUBLISH 1 q1 t "1"', '1.2 < PUBLISH 2 q1 t "2"']}
    assert not differences(first, same)
    for other in (
        {"a": first["a"][1:]},
        {"a": [first["a"][1], first["a"][0], first["a"][2]]},
        {"a": ['0.1 < PUBLISH 3 q1 t "1"', *first["a"][1:]]},
        {"a": ['0.1 < PUBLISH 1 dup q1 t "1"', *first["a"][1:]]},
        {"a": [*first["a"][:2], "0.3 < PUBACK 1 135"]},
        {"a": first["a"][:2]},
        {"a": [*first["a"], "0.4 < (closes)"]},
        {**first, "b": ["0.1 < CONNACK 0"]},
    ):
        assert differences(first, other)
        assert differences(other, first)
