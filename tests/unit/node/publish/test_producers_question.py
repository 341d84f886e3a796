"""A client that asks whether the broker knows producer sequences."""

import pytest

from holdfast.protocol.mqtt import packets as m
from holdfast.protocol.mqtt import properties as p
from tests.support.node_bench import NodeBench


def answer(properties: dict[int, object], version: int = 5) -> p.Properties:
    """What CONNACK says to CONNECT."""
    peer = NodeBench().connect("c", version, properties=properties)
    (connack,) = peer.take(m.Connack)
    assert isinstance(connack, m.Connack)
    return connack.properties


def test_a_question_is_answered() -> None:
    asked = answer({p.USER_PROPERTY: [("a", "b"), ("hf-seq", "?")]})
    assert asked.pop(p.USER_PROPERTY) == [("hf-seq", "1")]
    assert asked == answer({}), "and nothing else changes"


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {p.USER_PROPERTY: [("hf-seq", "1"), ("?", "hf-seq")]},
        {p.USER_PROPERTY: [("hf-seq", "?")], p.MAXIMUM_PACKET_SIZE: 100},
    ],
)
def test_no_question_or_no_room_no_answer(properties: dict[int, object]) -> None:
    """[MQTT-3.2.2-20]"""
    assert p.USER_PROPERTY not in answer(properties)


def test_mqtt_3_has_no_properties() -> None:
    assert answer({}, version=4) == {}
