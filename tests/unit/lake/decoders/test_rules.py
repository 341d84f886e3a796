"""Rules: which topics, which device, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.topics.names import matches
from holdfast_lake.decoders.decoded import DecodeError
from holdfast_lake.tables.rules import DEFAULT_RULES, Rule, RuleError, with_defaults


def rule_of(topic: str, *rules: Rule) -> Rule | None:
    for rule in with_defaults(rules):
        if re.match(rule.pattern(), topic):
            return rule
    return None


LEVELS = st.sampled_from(["", "a", "b", "$x", "a.b", "(", "[+]", "ä\n", "\\", "a b"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(
    lambda topic: topic and "+" not in topic
)  # fmt: skip
FILTERS = st.builds(
    lambda levels, end: "/".join([*levels, *end]),
    st.lists(LEVELS.filter(lambda level: "+" not in level) | st.just("+"), max_size=3),
    st.sampled_from([["#"], ["a"], [""], []]),
).filter(lambda text: text != "")


@given(FILTERS, TOPICS)
def test_patterns_match_as_filters_do(filter: str, topic: str) -> None:
    rule = Rule(filter)
    assert bool(re.match(rule.pattern(), topic)) == matches(filter, topic)


def test_the_first_rule_that_matches_counts() -> None:
    mine = (Rule("a/+", decode="csv"), Rule("a/b", decode="json"))
    found = rule_of("a/b", *mine)
    assert found is mine[0]
    found = rule_of("a/b/c", *mine)
    assert found is not None
    assert found.decode == "auto"


@pytest.mark.parametrize(
    ("topic", "decode"),
    [
        ("spBv1.0/G/NBIRTH/E", "sparkplug"),
        ("plant/pump/status", "presence"),
        ("tele/x/LWT", "status"),
        ("status", "auto"),
        ("plant/status/x", "auto"),
        ("spBv1.1/x", "auto"),
    ],
)
def test_default_rules(topic: str, decode: str) -> None:
    found = rule_of(topic)
    assert found is not None
    assert found.decode == decode


def test_topics_of_the_broker_are_left_out() -> None:
    assert rule_of("$SYS/broker/uptime") is None
    assert len(DEFAULT_RULES) < 45


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("topic", "a/b/c"), ("level 2", "b"), ("level -1", "c"), ("levels 1-2", "a/b"),
        ("levels 1--2", "a/b"), ("levels -2--1", "b/c"), ("client", "me"),
    ],
)  # fmt: skip
def test_devices(device: str, expected: str) -> None:
    assert Rule("a/#", device=device).device_of()("a/b/c", "me") == expected


def test_a_topic_with_too_few_levels_has_no_device() -> None:
    for device in ("level 4", "levels 2-4", "level -4", "levels 3-2"):
        with pytest.raises(DecodeError, match="the topic has 3 levels, the rule wants level"):
            Rule("a/#", device=device).device_of()("a/b/c", "")


def test_metrics_by_level() -> None:
    assert Rule("a/#", metric="level -1").metric_of()("a/b/c") == "c"
    assert Rule("a/#", metric="flow").metric_of()("a/b/c") == "flow"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"filter": "a/#/b"}, "#"),
        ({"filter": ""}, "at least one character"),
        ({"filter": "$share/g/a"}, "without \\$share"),
        ({"filter": "a", "decode": "xml"}, "there are auto, json"),
        ({"filter": "a", "device": "levle 2"}, "there are topic, client"),
        ({"filter": "a", "device": "level 0"}, "count from 1"),
        ({"filter": "a", "metric": "level x"}, "a name, 'level 3'"),
        ({"filter": "a", "prefix": "x"}, "such as 'level -1'"),
        ({"filter": "a", "decode": "gzip+ignore"}, "there are auto"),
        ({"filter": "a", "decode": "rot13+json"}, "before the \\+ there are gzip"),
        ({"filter": "a", "zone": "Europe/Atlantis"}, "'Europe/Berlin'"),
        ({"filter": "a", "drop": "x"}, "it is a tuple of texts; such as drop"),
        ({"filter": "a", "pairs": ("k", "v", "w")}, "names of key and value"),
        ({"filter": "a", "pairs": "mac"}, "it is a tuple of texts or None; such as pairs"),
        ({"filter": "a", "columns": ("x",)}, "columns are for decode='csv'"),
        ({"filter": "a", "decode": "csv", "columns": ("x", "x")}, "a name twice"),
        ({"filter": "a", "delimiter": ",,"}, "one character"),
        ({"filter": "a", "sequence_per": "client"}, "there are topic, device"),
        ({"filter": "a", "sequence_per": "device", "device": "field d"}, "use levels"),
        ({"filter": "a", "lateness_s": -1}, "are seconds, 0 to"),
    ],
)
def test_rules_that_cannot_work(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(RuleError, match=reason):
        Rule(**arguments)  # type: ignore[arg-type]


def test_fields_that_are_named_are_required() -> None:
    assert Rule("a").fields().required == frozenset()
    assert Rule("a", time="t", sequence="n", sent=None).fields().required == {
        "time", "sequence", "sent",
    }  # fmt: skip
    assert Rule("a", id="uuid", device="field d").fields().device == ("d",)
