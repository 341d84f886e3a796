"""One node on a host of its own under every fault that a single node can have, with every kind of
client: what was acknowledged stays, once and in order. For `make chaos` alone."""

from pathlib import Path

import pytest

from holdfast_lab.targets.namespaces import missing
from tests.e2e.chaos_campaign import play
from tests.e2e.chaos_faults import OF_ONE_NODE
from tests.e2e.chaos_site import lonely_site
from tests.e2e.ledger_spark import judge_again
from tests.e2e.test_cluster_chaos import IS_CAMPAIGN, PAUSE_MAX_S
from tests.e2e.test_kill9 import SEED


@pytest.mark.skipif(not IS_CAMPAIGN, reason="make chaos")
@pytest.mark.timeout(540)
def test_one_node(tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    names = [*OF_ONE_NODE, *OF_ONE_NODE]
    with lonely_site(tmp_path) as site:
        faults = [
            (name, OF_ONE_NODE[name])
            for name in names
            if name != "full disk" or site.small_disk is not None
        ]
        outcome = play(site, faults, SEED, tmp_path, pause_max_s=min(PAUSE_MAX_S, 5.0))
        print(f"\n{outcome.report()}")
        assert not site.tracebacks()
    assert not outcome.violations, outcome.report()
    print(judge_again(outcome.events, outcome.run, outcome.violations, tmp_path)[1])
    assert outcome.acknowledged > 50 * len(faults)
    assert outcome.wills > 0
    assert all(each.stall_s is not None for each in outcome.rounds)
