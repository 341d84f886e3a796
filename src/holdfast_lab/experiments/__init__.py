"""Experiments of the five papers, each against any target.

`EXPERIMENTS` is the registry: a new experiment is a module with a function `run`, and one entry
there. An experiment gets a target that serves and a `Trial`, and returns a `Result`. It raises
nothing that a target can cause: what a target refuses, loses or answers wrongly is in the result.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from holdfast_lab.experiments import (
    availability,
    federation,
    latency,
    load,
    packet_loss,
    publish_queue,
    repair,
    replication,
)
from holdfast_lab.experiments.trial import Trial
from holdfast_lab.results.store import Result
from holdfast_lab.targets.target import Target


@dataclass(frozen=True)
class Experiment:
    """An experiment: what it asks, where it comes from, and how it is made."""

    name: str
    question: str
    source: str
    targets: tuple[str, ...]
    """The targets that are measured unless others are named."""
    run: Callable[[Target, Trial], Awaitable[Result]]
    quick_targets: tuple[str, ...] = ()
    """Those of a quick run, if they are fewer."""

    def chosen(self, *, is_quick: bool) -> tuple[str, ...]:
        """The targets that are measured unless others are named."""
        return self.quick_targets if is_quick and self.quick_targets else self.targets


EXPERIMENTS: Final[dict[str, Experiment]] = {
    each.name: each
    for each in (
        Experiment(
            "availability",
            "How long is a client without service when the broker stops, dies or hangs?",
            "failover of an ActiveMQ pair, Table 1",
            ("pair", "cluster", "holdfast", "mosquitto", "activemq"),
            availability.run,
            ("pair", "cluster", "mosquitto"),
        ),
        Experiment(
            "packet-loss",
            "How many of 50 messages, one a second, are lost when the broker stops at the 24th?",
            "failover of an ActiveMQ pair, Figure 6",
            ("pair", "cluster", "mosquitto", "activemq"),
            packet_loss.run,
            ("pair", "cluster", "mosquitto"),
        ),
        Experiment(
            "latency",
            "How long do a confirmation and a delivery take with 20 to 100 clients?",
            "failover of an ActiveMQ pair, Figures 4 and 5",
            ("holdfast", "pair", "mosquitto", "activemq"),
            latency.run,
            ("holdfast", "mosquitto"),
        ),
        Experiment(
            "publish-queue",
            "What does exactly-once publishing cost, with QoS 2 and with the publish queue?",
            "Publish Queue client, Figure 5",
            ("holdfast", "mosquitto"),
            publish_queue.run,
        ),
        Experiment(
            "replication",
            "Has every replica the same messages in the same order, whatever node is killed?",
            "replication of a broker cluster on a hash ring",
            ("cluster",),
            replication.run,
        ),
        Experiment(
            "load",
            "What CPU, memory and network does a broker use with 0 to 10,000 clients?",
            "a broker's own core",
            ("holdfast", "mosquitto"),
            load.run,
        ),
        Experiment(
            "federation",
            "How long does a message take between brokers, and what if a relay is killed?",
            "self-managed federation, Table 1 (LAN)",
            ("federation", "sidecars", "bridges"),
            federation.run,
            ("federation", "bridges"),
        ),
        Experiment(
            "repair",
            "When has a member new neighbours whose neighbours on other continents fail at once?",
            "self-managed federation, Figures 11 and 12 (cloud)",
            ("cloud", "cloud-manager"),
            repair.run,
            ("cloud",),
        ),
    )
}
