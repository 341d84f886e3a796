"""Clusters on hosts of their own under every fault, with every kind of client: what was
acknowledged stays, once and in order. For `make chaos` alone.

`HOLDFAST_CHAOS_ROUNDS` faults, `HOLDFAST_CHAOS_SEED` to repeat their choice,
`HOLDFAST_CHAOS_FAULTS` to play only those (their names, separated by commas; KIND@SEED, as the
report names a round, to play that round again),
`HOLDFAST_CHAOS_REPORT` names a file for the report.
"""

import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast_lab.targets.namespaces import missing
from tests.e2e import chaos_damage, chaos_faults
from tests.e2e.chaos_campaign import Outcome, play
from tests.e2e.chaos_faults import OF_GATEWAYS_AND_MOVES, Fault, Planned, plan
from tests.e2e.chaos_site import SMALL_SEGMENTS, cluster_site
from tests.e2e.ledger_spark import judge_again
from tests.e2e.test_kill9 import SEED

IS_CAMPAIGN = "HOLDFAST_CHAOS_ROUNDS" in os.environ
ONLY = [name for name in os.environ.get("HOLDFAST_CHAOS_FAULTS", "").split(",") if name]
ROUNDS = int(os.environ.get("HOLDFAST_CHAOS_ROUNDS", "0"))
TIMEOUT_S = 1200 + 240 * ROUNDS
PAUSE_MAX_S = 30.0
FAULTS = chaos_faults.OF_A_CLUSTER | chaos_damage.OF_A_CLUSTER


def schedule(rounds: int, seed: int, faults: Mapping[str, Fault]) -> list[Planned]:
    """Every kind in turn, each turn in another order."""
    rng = random.Random(seed)
    names = ONLY or list(faults)
    found: list[str] = []
    while len(found) < rounds:
        found += rng.sample(names, len(names))
    return plan(found[:rounds], faults, seed)


def judge(outcome: Outcome) -> None:
    report = outcome.report()
    print(f"\n{report}")
    if path := os.environ.get("HOLDFAST_CHAOS_REPORT"):
        with Path(path).open("a") as file:
            file.write(f"{report}\n")
    assert not outcome.violations, report
    assert not outcome.independent.findings, report
    assert outcome.acknowledged > 50 * len(outcome.rounds)
    assert outcome.delivered > outcome.acknowledged
    assert any(each.stall_s is not None for each in outcome.rounds)


def run(directory: Path, nodes: int, rounds: int, gateways: int = 0) -> None:
    if missing():
        pytest.skip(missing())
    faults = schedule(rounds, SEED, FAULTS | OF_GATEWAYS_AND_MOVES if gateways else FAULTS)
    with cluster_site(directory, nodes, SMALL_SEGMENTS, gateways=gateways, has_disks=True) as site:
        without = site.unplayable()
        playable = [one for one in faults if one.kind not in without]
        outcome = play(site, playable, SEED, directory, pause_max_s=PAUSE_MAX_S)
        judge(outcome)
        assert not site.tracebacks()
    print(judge_again(outcome.events, outcome.run, outcome.violations, directory)[1])


@pytest.mark.skipif(not IS_CAMPAIGN, reason="make chaos")
@pytest.mark.timeout(TIMEOUT_S)
def test_three_nodes(tmp_path: Path) -> None:
    run(tmp_path, 3, ROUNDS)


@pytest.mark.skipif(not IS_CAMPAIGN, reason="make chaos")
@pytest.mark.timeout(TIMEOUT_S)
def test_five_nodes(tmp_path: Path) -> None:
    run(tmp_path, 5, ROUNDS)


@pytest.mark.skipif(not IS_CAMPAIGN, reason="make chaos")
@pytest.mark.timeout(TIMEOUT_S)
def test_five_nodes_and_two_gateways(tmp_path: Path) -> None:
    run(tmp_path, 5, ROUNDS, gateways=2)
