"""kill -9 at random moments under load: what was acknowledged stays, once and in order.

`HOLDFAST_CHAOS_ROUNDS` (default 4) kills, `HOLDFAST_CHAOS_SEED` to repeat a run.
"""

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.brokers import Broker, Mosquitto
from tests.e2e.chaos import crowd, shake
from tests.e2e.conftest import StartHoldfast
from tests.e2e.ledger import Ledger
from tests.e2e.ledger_checks import check

ROUNDS = int(os.environ.get("HOLDFAST_CHAOS_ROUNDS", "4"))
SEED = int(os.environ.get("HOLDFAST_CHAOS_SEED", str(time.time_ns() % 1_000_000)))


def restarting(broker: Broker) -> None:
    broker.kill()
    broker.start()


def describe(ledger: Ledger) -> str:
    """Violations by kind and the first few of each."""
    violations = check(ledger)
    counts = Counter(violation.kind for violation in violations)
    examples = [
        next(str(v) for v in violations if v.kind == kind and v.who == who)
        for kind, who in sorted({(v.kind, v.who) for v in violations})
    ]
    return f"seed {SEED}: {dict(counts)}\n" + "\n".join(examples)


def assert_load_was_real(ledger: Ledger, rounds: int) -> None:
    assert len(ledger.acknowledged) > 50 * rounds
    histories = [subscription.history for subscription in ledger.subscriptions.values()]
    assert len(histories) == 5
    assert all(len(history) > 10 * rounds for history in histories)


@pytest.mark.timeout(60 + 20 * ROUNDS)
def test_kill_9_under_load(start_holdfast: StartHoldfast) -> None:
    """[MQTT-4.4.0-1] [MQTT-4.3.2-3] [MQTT-4.3.3-10] [MQTT-4.5.0-1] [MQTT-4.6.0-5]
    [MQTT-3.1.2-5] [MQTT-3.1.2-23]"""
    broker = start_holdfast()
    ledger = Ledger()
    group = crowd(broker.port, ledger)
    try:
        shake(group, ROUNDS, random.Random(SEED), lambda: restarting(broker))
    finally:
        group.close()
    assert_load_was_real(ledger, ROUNDS)
    assert not check(ledger), describe(ledger)


def test_connections_cut_under_load(start_holdfast: StartHoldfast) -> None:
    """The same without a kill: every client but no broker is hurt."""
    broker = start_holdfast({"log": {"durability": "memory"}})
    ledger = Ledger()
    group = crowd(broker.port, ledger)

    def cut_all() -> None:
        for party in group.parties:
            group.cut(party)

    try:
        shake(group, 4, random.Random(SEED), cut_all)
    finally:
        group.close()
    assert_load_was_real(ledger, 4)
    assert not check(ledger), describe(ledger)


def test_clients_and_ledger_find_mosquitto_right(mosquitto: Broker) -> None:
    """Control: with connections cut, a mature broker keeps the promise and the test says so."""
    ledger = Ledger()
    group = crowd(mosquitto.port, ledger)

    def cut_all() -> None:
        for party in group.parties:
            group.cut(party)

    try:
        shake(group, 3, random.Random(SEED), cut_all)
    finally:
        group.close()
    assert_load_was_real(ledger, 3)
    assert not check(ledger), describe(ledger)


def test_a_forgetful_broker_is_found_out(tmp_path: Path, mosquitto: Mosquitto) -> None:
    """Control: a broker that keeps nothing on disk breaks the promise, and the ledger sees it."""
    ledger = Ledger()
    group = crowd(mosquitto.port, ledger)
    try:
        shake(group, 1, random.Random(SEED), lambda: restarting(mosquitto), drain_s=2.0)
    finally:
        group.close()
    found = {violation.kind for violation in check(ledger)}
    assert {"lost", "session lost"} <= found
