"""What a client is told when its message is not taken after all."""

import pytest

from holdfast.log.journal.journal import Journal
from holdfast.log.record import FLAG_PACKET_ID, MESSAGE, Record
from holdfast.node.config import NodeConfig
from holdfast.node.publish.completion import PublishPromise
from holdfast.node.refusal import Rejection
from holdfast.node.session.connection import OPEN, Connection
from holdfast.node.session.listener_rules import ListenerRules
from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import PUBREC
from tests.support.journal_port import new_state


@pytest.mark.parametrize(
    ("reason", "is_told"), [(reasons.QUOTA_EXCEEDED, True), (reasons.SESSION_TAKEN_OVER, False)]
)
def test_a_reason_that_no_acknowledgement_may_have_ends_the_connection(
    reason: int, is_told: bool
) -> None:
    """Another node has the session by now. [MQTT-3.5.2-1]"""
    state = new_state(NodeConfig(partitions=1), Journal(1, replicated=True))
    connection = Connection(1 << 20, "", ListenerRules(""))
    connection.version = 5
    connection.state = OPEN
    connection.unacknowledged = 1
    record = Record(0, MESSAGE, flags=2 | FLAG_PACKET_ID, topic=b"t", client_id=b"c", sequence=7)
    PublishPromise(record, connection, 7, False).refuse(state, Rejection("not taken", reason))
    assert [packet[0] >> 4 for packet in connection.out or ()] == ([PUBREC] if is_told else [])
    assert connection.closing != is_told
    assert connection.unacknowledged == 0
