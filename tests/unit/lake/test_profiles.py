"""The profiles of makers: their examples, found by `infer` in a log with all of them at once."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql")

from holdfast_lake.tables.inference import Message, infer
from holdfast_lake.tables.profiles import ProfileError, load_profiles, profile_of
from holdfast_lake.tables.rules import Rule
from tests.support.device_payloads import Example, as_bytes, examples
from tests.support.fold_log import TIME_US, Log
from tests.support.source_tree import place

FOLDER = place("holdfast_lake/profiles")
FILES = sorted(FOLDER.glob("*.toml"))
MAKERS = Path(__file__).parents[2] / "data" / "devices" / "makers.toml"
BERLIN = "Europe/Berlin"


def messages_of(*some: Example) -> list[Message]:
    """The messages of examples as a log has them."""
    found = []
    for example in some:
        for at, (topic, payload) in enumerate(example.messages):
            found.append((topic, as_bytes(payload), TIME_US + at * 1_000_000))
    return found


def rules_by(messages: list[Message]) -> list[Rule]:
    """The rules that `infer` proposes, made from their texts."""
    return [eval(each.rule, {"Rule": Rule}) for each in infer(messages, zone=BERLIN)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_profile_is_found_by_its_messages_and_gives_its_rows(path: Path) -> None:
    for example in examples(path):
        rules = rules_by(messages_of(example))
        assert rules
        example.check(example.read(rules))


def test_all_makers_in_one_log_do_not_disturb_each_other() -> None:
    several = [example for path in FILES for example in examples(path)]
    rules = rules_by(messages_of(*several))
    for example in several:
        example.check(example.read(rules))


def test_rules_for_makers_without_a_profile_lose_and_mix_nothing() -> None:
    several = examples(MAKERS)
    assert len({each.about for each in several}) + len(FILES) >= 55
    messages = messages_of(*several)
    rules = rules_by(messages * 5)
    by_rules, by_default = Log(*rules), Log()
    for topic, payload, _ in messages:
        by_rules.add(topic, payload)
        by_default.add(topic, payload)
    found, usual = by_rules.read(), by_default.read()
    topics: dict[tuple[str, str], set[str]] = {}
    for row in found.readings:
        topics.setdefault((row["device"], row["metric"]), set()).add(row["topic"])
    assert [each for each in topics.items() if len(each[1]) > 1] == []
    assert {row["topic"] for row in found.readings} == {row["topic"] for row in usual.readings}
    assert len(found.quarantine) <= len(usual.quarantine)


def test_each_profile_has_enough_examples() -> None:
    assert len(FILES) >= 22
    for path in FILES:
        found = examples(path)
        assert sum(len(example.messages) for example in found) >= 3, path.stem
        assert all(example.rows for example in found), path.stem


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("title = 1\nfound = []", "rule is missing"),
        ("found = []\nrule = []\n", "title is missing"),
        ("title = ''\nfound = [{}]\nrule = []", "topic is missing"),
        ("title = ''\nfound = []\n[[rule]]\nfilter = 'a'\ndecode = 'xml'", "there are auto"),
        (
            "title = ''\nfound = []\n[[rule]]\nfilter = 'a'\ndevise = 'x'",
            "devise is not known in each rule; there are .*device",
        ),
        (
            "title = ''\nfound = []\n[[rule]]\nfilter = 'a'\ndrop = 3",
            "drop=3; it is a tuple of texts",
        ),
        ("title = ''\nfound = []\n[[rule]]\nfilter = 'a'\nlateness_s = 'x'", "it is a number"),
        ("title = ''\nfound = []\nrule = ['a']", "each rule is a table, not 'a'"),
        ("title = ''\nfound = 'a/b'\nrule = []", "each item of `found`.* is a table, not 'a'"),
        ("title = ''\nfound = [{ topik = 'a' }]\nrule = []", "topik is not known"),
        ("title = ''\nfound = [{ topic = '{bse}/a' }]\nrule = []", "topic has {bse}; there are"),
        ("title = ''\nfound = [{ topic = 'a', fields = 'b' }]\nrule = []", "a list of names"),
        ("title = ''\nfound = []\nrule = []\nrules = []", "rules is not known"),
        ("title", "Expected '='"),
    ],
)
def test_a_wrong_profile_is_told_with_its_file(text: str, reason: str) -> None:
    with pytest.raises(ProfileError, match=f"mine.toml: .*{reason}"):
        profile_of("mine", text.encode(), "mine.toml")


def test_a_profile_of_ones_own_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "tasmota.toml"
    own.write_text(
        'title = "Mine"\nfound = [{ topic = "tele/+/LWT" }]\n'
        '[[rule]]\nfilter = "tele/+/#"\ndevice = "level 2"\nwhy = "all"\n'
    )
    profiles = load_profiles(tmp_path)
    assert [each.name for each in profiles].count("tasmota") == 1
    found = infer([("tele/plug/LWT", b"Online", TIME_US)], profiles)
    assert [each.reason for each in found] == ["Mine: all; 1 device, such as plug; 1 metric, "
                                               "such as value"]  # fmt: skip
    with pytest.raises(ProfileError, match="it is no folder"):
        load_profiles(tmp_path / "nowhere")


def test_the_reason_of_a_rule_without_one_is_the_title() -> None:
    text = b"\xef\xbb\xbftitle = 'Mine'\nfound = [{topic = 'a/+'}]\n[[rule]]\nfilter = 'a/+'"
    found = infer([("a/b", b'{"x": 1}', TIME_US)], [profile_of("mine", text, "mine.toml")])
    assert [each.reason for each in found] == ["Mine; 1 device, such as a/b; 1 metric, such as x"]


def test_a_local_time_needs_its_zone() -> None:
    """Without it the time of the broker is used, and the reason says what to write."""
    text = b'{"time":"2026-09-21 10:13:20","model":"M","id":7,"v":1}'
    messages = [("rtl_433/pi/events", text, TIME_US)]
    unknown = infer(messages, zone="")[0]
    assert "time=None" in unknown.rule
    assert "4.00 h behind the broker's" in unknown.reason
    known = infer(messages, zone="America/New_York")[0]
    assert 'time="time", zone="America/New_York"' in known.rule
    utc = infer([("rtl_433/pi/events", text.replace(b"10:13", b"14:13"), TIME_US)], zone=BERLIN)[0]
    assert 'time="time"' in utc.rule
    assert "zone" not in utc.rule
