"""Brokers that experiments run against, each started as processes of its own.

`TARGETS` is the registry: a new broker is a subclass of `Target` and one line there. Any broker
that runs already is a target by its address, `HOST:PORT` or `HOST:PORT,pid=N`; without the process
id its CPU and memory are not measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from holdfast_lab.targets.activemq import ActiveMqPair
from holdfast_lab.targets.cloud import CloudTarget, ManagedCloudTarget
from holdfast_lab.targets.federation import BridgesTarget, FederationTarget, SidecarsTarget
from holdfast_lab.targets.holdfast import ClusterTarget, PairTarget, SingleTarget
from holdfast_lab.targets.mosquitto import Mosquitto
from holdfast_lab.targets.others import (
    AedesBroker,
    AmqttBroker,
    EjabberdCluster,
    NatsCluster,
    NatsSyncCluster,
    RabbitMqCluster,
)
from holdfast_lab.targets.target import Remote, Target, TargetError

TARGETS: Final[dict[str, Callable[[Path], Target]]] = {
    "holdfast": SingleTarget,
    "pair": PairTarget,
    "cluster": ClusterTarget,
    "mosquitto": Mosquitto,
    "activemq": ActiveMqPair,
    **{
        each.name: each
        for each in (
            NatsCluster,
            NatsSyncCluster,
            RabbitMqCluster,
            EjabberdCluster,
            AedesBroker,
            AmqttBroker,
        )
    },
    "federation": FederationTarget,
    "sidecars": SidecarsTarget,
    "bridges": BridgesTarget,
    "cloud": CloudTarget,
    "cloud-manager": ManagedCloudTarget,
}


def target_of(text: str, directory: Path) -> Target:
    """The target of a name of `TARGETS` or an address. Raises `TargetError` for another text."""
    if text in TARGETS:
        return TARGETS[text](directory)
    if ":" in text:
        return Remote(text)
    known = ", ".join(TARGETS)
    raise TargetError(f"target {text!r}: choose from {known}, or give HOST:PORT[,pid=N]")
