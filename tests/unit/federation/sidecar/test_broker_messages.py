"""Between a broker's session and the federation: places in the log, and interest, counted."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.mqtt.packets import PUBLISH, Properties
from holdfast.protocol.mqtt.properties import (
    CONTENT_TYPE,
    CORRELATION_DATA,
    USER_PROPERTY,
    decode_block,
    encode_block,
)
from holdfast.protocol.topics.names import is_shared, matches, split_shared
from holdfast_federation.sidecar.edge_broker.interest import BrokerInterest
from holdfast_federation.sidecar.edge_broker.origin_offset import (
    LogPlace,
    offset_in,
    with_offset,
    without_offset,
)

NODE = bytes(range(16))
NAMES = st.sampled_from(["hf-place", "hf-seq", "a", ""])
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
VALUES = st.one_of(TEXTS, st.just(f"{NODE.hex()}:log:1:2"), st.just("&\x01\x08hf-place"))
BLOCKS = st.fixed_dictionaries(
    {},
    optional={
        CORRELATION_DATA: st.one_of(
            st.binary(max_size=20), st.just(b"\x26\x00\x08hf-place\x00\x01x")
        ),
        CONTENT_TYPE: TEXTS,
        USER_PROPERTY: st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=5),
    },
)
PLACES = st.builds(
    LogPlace,
    st.just(NODE),
    st.text("0123456789abcdef", min_size=1, max_size=16),
    st.integers(0, 4095),
    st.integers(0, 2**62),
)


@given(BLOCKS, PLACES)
def test_a_place_goes_along_and_comes_off_whatever_else_there_is(
    fields: Properties, place: LogPlace
) -> None:
    block = encode_block(fields)
    marked = with_offset(block, place)
    assert offset_in(marked) == place
    pairs = fields.get(USER_PROPERTY, [])
    assert isinstance(pairs, list)
    kept = [pair for pair in pairs if isinstance(pair, tuple) and pair[0] != "hf-place"]
    expected = {**fields, USER_PROPERTY: kept}
    if not kept:
        del expected[USER_PROPERTY]
    bare = without_offset(marked)
    assert decode_block(bare, 0, len(bare), PUBLISH) == expected
    assert offset_in(bare) is None
    assert without_offset(block) == bare


@given(BLOCKS)
def test_what_nobody_of_us_has_written_is_no_place(fields: Properties) -> None:
    found = offset_in(encode_block(fields))
    assert found is None or found == LogPlace(NODE, "log", 1, 2)


FILTERS = st.sampled_from(
    ["#", "+", "a", "a/#", "a/+", "b/c", "+/c", "$share/g/a/#", "$share/g/#", "$SYS/#"]
)
IMPORTS = st.sampled_from([["#"], ["a/#"], ["+/c", "b"]])


@given(IMPORTS, st.lists(st.tuples(st.booleans(), FILTERS, st.booleans()), max_size=60))
def test_what_is_told_is_what_sessions_have_as_far_as_it_may_come_in(
    imports: list[str], steps: list[tuple[bool, str, bool]]
) -> None:
    interest = BrokerInterest(imports, list)
    sessions: Counter[str] = Counter()
    told: Counter[str] = Counter()
    for begins, filter, tells in [*steps, (True, "end", True)]:
        if begins:
            sessions[filter] += 1
            interest.note(filter, True)
        elif sessions[filter]:
            sessions[filter] -= 1
            interest.note(filter, False)
        if tells:
            added, removed = interest.take_changes()
            told.update(added)
            told.subtract(removed)
            assert min(told.values(), default=0) >= 0
    wanted = set(+sessions)
    for topic in ("a", "b", "a/c", "b/c", "c/c", "a/b/c", "end"):
        may = any(matches(one, topic) for one in imports)
        for group in ("", "g"):
            here = {_plain(one) for one in wanted if _group(one) == group}
            there = {_plain(one) for one in +told if _group(one) == group}
            is_wanted = any(matches(one, topic) for one in here)
            assert any(matches(one, topic) for one in there) == (is_wanted and may), topic


def _group(filter: str) -> str:
    return split_shared(filter)[0].split("~")[0] if is_shared(filter) else ""


def _plain(filter: str) -> str:
    return split_shared(filter)[1] if is_shared(filter) else filter
