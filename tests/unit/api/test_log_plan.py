"""A plan of a large read, made while the node forgets a log."""

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.api.log_plan import NotStored, ReadPlanner, ReadRequest, RemovedRecords


class ForgetfulBroker:
    """The log of its partition ends at 20 and begins at 0. It is forgotten after `is_stored`."""

    def __init__(self, *, forgets: bool) -> None:
        journal = SimpleNamespace(restarts=0, high_watermark=[20])
        self.node: Any = SimpleNamespace(
            state=SimpleNamespace(journal=journal, config=SimpleNamespace(partitions=1))
        )
        remote = SimpleNamespace(is_stored=lambda partition: True)
        self.runtime: Any = SimpleNamespace(cluster_node=SimpleNamespace(remote_reads=remote))

        def first_offset(partition: int) -> int:
            journal.restarts += forgets
            return 20

        self.reader: Any = SimpleNamespace(first_offset=first_offset)

    def generation(self) -> int:
        return 0


def test_a_log_that_is_forgotten_is_not_one_that_retention_has_shortened() -> None:
    """The reader would take the records for removed. Other nodes have them."""
    request = ReadRequest([(0, 5, 20)])
    with pytest.raises(RemovedRecords):
        ReadPlanner().plan(ForgetfulBroker(forgets=False), request)  # type: ignore[arg-type]
    with pytest.raises(NotStored):
        ReadPlanner().plan(ForgetfulBroker(forgets=True), request)  # type: ignore[arg-type]
