"""The benchmark of the core alone: every message of a round is delivered and acknowledged."""

from bench.core import MESSAGES, Core, measure


def test_a_round_leaves_nothing_behind() -> None:
    core = Core(3)
    core.round()
    stats = core.node.state.stats
    assert stats.publish_sent == 3 * MESSAGES
    for subscriber in core.subscribers:
        assert subscriber.session is not None
        assert subscriber.session.inflight == {}


def test_it_measures() -> None:
    assert 0 < measure(2, 3) < 1_000_000
