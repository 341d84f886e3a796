"""One node on a host of its own under every fault that a single node can have, with every kind of
client: what was acknowledged stays, once and in order. For `make chaos` alone.

Each fault twice; with `HOLDFAST_CHAOS_FAULTS` those `HOLDFAST_CHAOS_ROUNDS` times. All of it is
repeated for `HOLDFAST_CHAOS_SECONDS`."""

import os
from pathlib import Path

import pytest

from holdfast_lab.targets.namespaces import missing
from tests.e2e import chaos_damage, chaos_faults
from tests.e2e.chaos_campaign import play
from tests.e2e.chaos_faults import plan
from tests.e2e.chaos_site import lonely_site
from tests.e2e.ledger_spark import judge_again
from tests.e2e.test_cluster_chaos import IS_CAMPAIGN, ONLY, PAUSE_MAX_S, ROUNDS, TIMEOUT_S
from tests.e2e.test_kill9 import SEED

FAULTS = chaos_faults.OF_ONE_NODE | chaos_damage.OF_ONE_NODE
SECONDS = float(os.environ.get("HOLDFAST_CHAOS_SECONDS", "0"))


@pytest.mark.skipif(not IS_CAMPAIGN, reason="make chaos")
@pytest.mark.timeout(TIMEOUT_S + 2 * SECONDS)
def test_one_node(tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    chosen = [name for name in ONLY if name.partition("@")[0] in FAULTS]
    names = chosen * ROUNDS if ONLY else [*FAULTS] * 2
    with lonely_site(tmp_path) as site:
        without = site.unplayable()
        faults = [each for each in plan(names, FAULTS, SEED) if each.kind not in without]
        pause_max_s = min(PAUSE_MAX_S, 5.0)
        outcome = play(site, faults, SEED, tmp_path, pause_max_s=pause_max_s, duration_s=SECONDS)
        print(f"\n{outcome.report()}")
        assert not site.tracebacks()
    assert not outcome.violations, outcome.report()
    assert not outcome.independent.findings, outcome.report()
    print(judge_again(outcome.events, outcome.run, outcome.violations, tmp_path)[1])
    assert outcome.acknowledged > 50 * len(outcome.rounds)
    assert outcome.wills > 0
    assert all(each.stall_s is not None for each in outcome.rounds)
