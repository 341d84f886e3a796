from holdfast.protocol.mqtt import reasons
from holdfast.protocol.mqtt.packets import TYPE_NAMES

# Every code of MQTT 5.0, section 2.4.
CODES = {0x00, 0x01, 0x02, 0x04, 0x10, 0x11, 0x18, 0x19, *range(0x80, 0xA3)}


def test_every_code_has_a_name_and_a_constant() -> None:
    assert set(reasons.NAMES) == CODES
    assert len(set(reasons.NAMES.values())) == len(CODES)
    others = set(TYPE_NAMES.values())
    constants = {
        value
        for name, value in vars(reasons).items()
        if name.isupper() and type(value) is int and name[0] != "_" and name not in others
    }
    assert constants == CODES


def test_every_code_is_allowed_somewhere() -> None:
    allowed: set[int] = set()
    for codes in reasons.ALLOWED.values():
        allowed |= codes
    assert allowed == CODES


def test_connack_return_code() -> None:
    assert [reasons.connack_return_code(code) for code in (0, 0x84, 0x85, 0x88, 0x86, 0x87)] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    for code in CODES - {0}:
        assert 1 <= reasons.connack_return_code(code) <= 5


def test_connack_reason_is_the_inverse() -> None:
    for return_code in range(6):
        reason = reasons.connack_reason(return_code)
        assert reasons.connack_return_code(reason) == return_code
    assert reasons.connack_reason(6) == -1
    assert reasons.connack_reason(255) == -1


def test_suback_return_code() -> None:
    """[MQTT3-3.9.3-2]"""
    for code in CODES:
        expected = code if code <= 2 else 0x80
        assert reasons.suback_return_code(code) == expected
