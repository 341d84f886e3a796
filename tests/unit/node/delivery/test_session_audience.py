"""For whom a message is: as records have it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.node.session.audience import Audience, decode_audience, encode_audience

LEVELS = st.text(st.characters(exclude_characters="\0/+#", codec="utf-8"), min_size=1, max_size=5)
KEYS = st.builds("$share/{}/{}".format, LEVELS, LEVELS)


@given(st.booleans(), st.sets(KEYS, max_size=5))
def test_what_is_written_is_read(is_plain: bool, groups: set[str]) -> None:
    audience = Audience(is_plain, groups)
    data = encode_audience(audience)
    assert decode_audience(data) == audience
    assert hash(decode_audience(data)) == hash(audience)
    assert audience != Audience(not is_plain, groups)
    assert audience != Audience(is_plain, {*groups, "$share/another/group/#"})


def test_most_cost_one_byte() -> None:
    assert encode_audience(Audience(True, ())) == b"\x01"
    assert encode_audience(Audience(False, ())) == b"\x00"


@pytest.mark.parametrize("data", [b"", b"\x00\xff"])
def test_what_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"audience|utf-8"):
        decode_audience(data)
