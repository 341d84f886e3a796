"""The models with seeds: what `python -m tests.model` can run."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tests.support.seeds import playing


@dataclass(frozen=True)
class Model:
    """A simulation of one part. `runs` names a function of a seed, or a class of worlds, as
    `module:name`."""

    runs: str
    is_interpreted: bool = False
    """The simulation replaces parts of compiled classes, so the source of all of them must run."""

    def load(self) -> Callable[[int], object]:
        """A function of a seed. It raises an exception if the run is wrong."""
        module, _, name = self.runs.partition(":")
        found = getattr(importlib.import_module(module), name)
        return playing(found) if isinstance(found, type) else found  # type: ignore[no-any-return]


MODELS: Final[dict[str, Model]] = {
    "sessions": Model("tests.model.test_sessions:run"),
    "shared-groups": Model("tests.model.test_sessions_shared:run"),
    "queues": Model("tests.model.test_queue_sessions:run"),
    "delayed": Model("tests.model.test_delayed_messages:run"),
    "replay": Model("tests.model.test_replay_sessions:run"),
    "mixed-qos": Model("tests.model.test_mixed_qos_order:mix"),
    "mixed-qos-repeated": Model("tests.model.test_mixed_qos_order:repeat"),
    "replay-qos0": Model("tests.model.test_replay_qos0:run"),
    "producers": Model("tests.model.test_producer_sequences:run"),
    "pubqueue": Model("tests.model.test_pubqueue_model:walk"),
    "retained": Model("tests.model.test_retained_updates:update_and_look"),
    "log-replica": Model("tests.model.test_log_replica:crash_a_replica"),
    "replication": Model("tests.support.sim_replication:World"),
    "raft": Model("tests.support.sim_meta:World"),
    "elections": Model("tests.support.sim_raft:ElectionWorld"),
    "controller": Model("tests.support.sim_controller:life"),
    "lease": Model("tests.support.sim_world:World", is_interpreted=True),
    "federation": Model("tests.support.sim_federation:rough_world"),
    "federation-retained": Model("tests.support.sim_retained:rough_retained_world"),
    "federation-groups": Model("tests.support.sim_groups:rough_groups_world"),
    "moving-groups": Model("tests.model.test_federation_moving_groups:move_a_group"),
    "edges": Model("tests.model.test_federation_edges:cross_an_edge"),
    "put-back": Model("tests.support.sim_put_back:put_back_world"),
    "healing": Model("tests.model.test_federation_healing:heal"),
    "brokers": Model("tests.transcripts.seeds:compare_forms"),
    "member-in-a-cluster": Model("tests.model.test_cluster_federators:run"),
    "paper": Model("tests.support.paper_worlds:rough_world"),
}
"""By the name that the command takes."""
