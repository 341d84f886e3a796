"""Hints about topics on which several devices publish, which no rule keeps apart: from the records
of a lake to the line of `status`."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from holdfast_lake.lake import samples, status
from holdfast_lake.lake.catalog import Catalog, load_catalog
from holdfast_lake.lake.schema import RECORDS_COLUMNS
from holdfast_lake.report.report import report
from holdfast_lake.tables import Rule, readings_table
from holdfast_lake.tables.device_fields import FIELDS_MAX, other_device_fields
from holdfast_lake.tables.field_roles import MESSAGES_PER_TOPIC
from tests.support.device_payloads import as_bytes, examples
from tests.support.gold_files import write_rows, write_table
from tests.support.source_tree import place
from tests.unit.lake.tables.test_inference import BELIEFS, FLEETS, fleet, proposed

BEGIN = datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)
Messages = Iterable[Sequence[str | bytes]]
METERS = ("amr", '{"Message":{"ID":100,"Use":#}}'), ("amr", '{"Message":{"ID":200,"Use":9#}}')
TAGS = (
    ("gw/X/status", '[{"mac":"AC01","temperature":21.#},{"mac":"AC02","temperature":19.0}]'),
    ("gw/X/status", '[{"mac":"AC02","temperature":19.#},{"mac":"AC01","temperature":21.0}]'),
)
APART = "keeps them apart (see `holdfast pipeline infer`)"


def hints_of(lake: Path, messages: Messages, *rules: Rule) -> list[str]:
    """The hints of a lake with these records: topic, payload and perhaps the client id."""
    rows = [
        {"topic": topic, "payload": text.encode() if isinstance(text, str) else text,
         "client_id": client[0] if client else "c", "timestamp": BEGIN + timedelta(seconds=at)}
        for at, (topic, text, *client) in enumerate(messages)
    ]  # fmt: skip
    write_rows(lake, "records", RECORDS_COLUMNS, ("date",), rows)
    return status.hints(lake, catalog(*rules))


def catalog(*rules: Rule) -> Catalog:
    return load_catalog([], [readings_table(rules)])


def test_devices_of_one_topic_are_told_until_a_rule_keeps_them_apart(tmp_path: Path) -> None:
    messages = fleet(*METERS, *TAGS, times=6)
    rule, listed = 'Rule("amr", device="field Message.ID")', "Rule(\"gw/X/status\", pairs=('mac',))"
    assert hints_of(tmp_path, messages) == [
        "readings: Message.ID has 2 values such as 100 and 200 in 12 messages of 1 topic such as "
        f"amr, and all are one device: {rule} {APART}",
        "readings: mac has 2 values such as AC01 and AC02 in 12 messages of 1 topic such as "
        f"gw/X/status, and all are one device: {listed} {APART}",
    ]
    (left,) = status.hints(tmp_path, catalog(eval(rule)))
    assert "mac has 2 values" in left
    assert status.hints(tmp_path, catalog(eval(rule), eval(listed))) == []
    assert status.hints(tmp_path, catalog(Rule("#"))) == [], "it is meant"


def test_topics_of_one_shape_are_one_line(tmp_path: Path) -> None:
    parts = [(f"gw/{gateway}/up", f'{{"deviceId":"d{n}","t":#}}')
             for gateway in range(4) for n in (1, 2)]  # fmt: skip
    (hint, *others) = hints_of(tmp_path, fleet(*parts))
    assert "24 messages of 4 topics such as gw/0/up" in hint
    assert 'Rule("gw/+/up", device="field deviceId")' in hint
    assert all("match no rule" in other for other in others)
    many = [(f"{'x/' * depth}t", f'{{"deviceId":"d{n}","t":#}}') for depth in range(9)
            for n in (1, 2)]  # fmt: skip
    found = hints_of(tmp_path / "many", fleet(*many))
    assert "and 4 more patterns of topics like it" in found


def test_the_metrics_of_one_topic_are_told(tmp_path: Path) -> None:
    tags = ('{"tag":"Pump.Speed","value":9#}', '{"tag":"Tank.Level","value":#}')
    (hint,) = hints_of(tmp_path, fleet(*(("plc", text) for text in tags)))
    assert "and all are one metric: " in hint
    assert 'Rule("plc", metric="field tag", value="value")' in hint


def test_devices_by_the_rules_of_their_maker_are_told(tmp_path: Path) -> None:
    (meshtastic,) = examples(place("holdfast_lake/profiles/meshtastic.toml"))[:1]
    (hint,) = hints_of(tmp_path, meshtastic.messages)
    assert "from has 2 values" in hint
    assert 'device="field from"' in hint


@pytest.mark.parametrize(
    ("turns", "texts", "is_told"),
    [
        ("ababab", ('{"t":2#.5}', '{"t":1#.5}'), True),
        ("ababab", ("2#.5", "1#.5"), True),
        ("aaaaaa", ("2#.5", "1#.5"), False),
        ("aaabbb", ("2#.5", "1#.5"), False),
        ("abcdef", ("2#.5", "1#.5"), False),
        ("ababab", ("on", "off"), False),
        ("ababab", ('{"mode":"x"}', '{"t":1#.5}'), False),
        ("ababab", ("2#.5", "2#.5"), False),
    ],
)
def test_clients_that_share_a_topic_are_told(
    tmp_path: Path, turns: str, texts: tuple[str, ...], is_told: bool
) -> None:
    """Two that send the same are one pair of bridges, and an id that never comes again is that of
    a connection."""
    messages = [(("hall/t", "hall/t/set")[each], texts[at % 2].replace("#", str(at // 2)), client)
                for at, client in enumerate(turns) for each in (0, 1)]  # fmt: skip
    found = hints_of(tmp_path, messages)
    assert bool(found) == is_told
    if is_told:
        assert found == [
            "readings: client id has 2 values such as a and b in 6 messages of 1 topic such as "
            f'hall/t, and all are one device: Rule("hall/t", device="client") {APART}'
        ]


SHARED: dict[str, tuple[str, str]] = {
    # One shape of a maker for each spelling: two devices below one topic, and their rule.
    "a gateway of Shelly's Bluetooth": (
        '{"id":1,"event":"shelly-blu","data":{"pid":12#,"temperature":2#.5,"address":"b0:c7:0%"}}',
        'device="field data.address"'),
    "thermometers of one wire": ('{"addr":"28-0%","t":2#.5}', 'device="field addr"'),
    "rtlamr, SCM+": ('{"Type":"SCM+","Message":{"EndpointID":458%,"Consumption":#}}',
                     'device="field Message.EndpointID"'),
    "rtlamr, IDM": ('{"Type":"IDM","Message":{"ERTType":7,"ERTSerialNumber":45%,"Last":#}}',
                    'device="field Message.ERTSerialNumber"'),
    "ships": ('{"class":"AIS","mmsi":21110%,"speed":1#.1}', 'device="field mmsi"'),
    "aircraft": ('{"icao24":"3c661%","alt":#}', 'device="field icao24"'),
    "a poll of Modbus": ('{"slave":%,"value":2#}', 'device="field slave"'),
    "packs of a battery": ('{"pack":%,"soc":9#}', 'device="field pack"'),
    "cells of batteries": ('{"battery_id":"b%","cells":[3.3#,3.31]}', 'device="field battery_id"'),
    "lamps of WiZ": ('{"method":"syncPilot","params":{"mac":"a8bb0%","dimming":2#}}',
                     'device="field params.mac"'),
    "events of Home Assistant": (
        '{"event_data":{"entity_id":"sensor.%","new_state":{"state":"2#.5"}}}',
        'device="field event_data.entity_id"'),
    "Sigfox": ('{"device":"1A2%","time":"179000000#","data":"00ff","lqi":"Good"}',
               'device="field device"'),
    "Actility": ('{"DevEUI_uplink":{"DevEUI":"70B3A%","FCntUp":1#,"payload_hex":"0167"}}',
                 'device="field DevEUI_uplink.DevEUI"'),
    "Milesight": ('{"devEUI":"24e12%","fCnt":1#,"fPort":85,"rxInfo":[{"mac":"24e1","rssi":-5#}]}',
                  'device="field devEUI"'),
    "wmbusmeters": ('{"media":"water","meter":"multical21","id":"7634879%","total_m3":6.#}',
                    'device="field id"'),
    "chargers by their serial number": ('{"serial":3000%,"p_in":2#}', 'device="field serial"'),
    "Ignition": ('{"tagPath":"[default]%","value":2#,"quality":192}',
                 'metric="field tagPath", value="value"'),
    "eWON": ('{"TagName":"T%","TagValue":2#.5}', 'metric="field TagName", value="TagValue"'),
    "Vera": ('{"variable":"V%","value":"2#.5","device":12}',
             'metric="field variable", value="value"'),
    "inverters of Enphase": (
        '[{"serialNumber":"12%","lastReportWatts":2#},{"serialNumber":"12^","lastReportWatts":9#}]',
        "pairs=('serialNumber',)"),
    "a list with numbers as names": ('{"devs":[{"id":%,"t":2#.5},{"id":^,"t":1#.5}]}',
                                     "pairs=('id',)"),
    "a gateway of Minew": (
        '[{"timestamp":"2026-09-21T14:13:2#Z","mac":"AC3FA%","temperature":2#.5},'
        '{"timestamp":"2026-09-21T14:13:2#Z","mac":"AC3FA^","temperature":1#.5}]',
        "pairs=('mac',)"),
    "a gateway of KKM": (
        '{"msg":"advData","gmac":"68B","obj":[{"dmac":"D%","temp":2#.5},{"dmac":"D^","temp":1#}]}',
        "pairs=('dmac',)"),
    "a gateway of MOKO": (
        '{"msg_id":3004,"device_info":{"mac":"F0"},"data":[{"mac":"D%","t":2#},{"mac":"D^","t":1}]}',
        "pairs=('mac',)"),
}  # fmt: skip


@pytest.mark.parametrize("about", SHARED)
def test_devices_of_makers_that_share_a_topic_are_told_as_infer_proposes(
    tmp_path: Path, about: str
) -> None:
    text, rule = SHARED[about]
    messages = fleet(*(("hub/data", text.replace("%", one).replace("^", other))
                       for one, other in ("12", "21")), times=6)  # fmt: skip
    (hint,) = hints_of(tmp_path, messages)
    assert f'Rule("hub/data", {rule}) {APART}' in hint
    (proposal,) = proposed(messages)
    assert rule in proposal.rule
    assert status.hints(tmp_path, catalog(eval(proposal.rule))) == []
    alone = fleet(("hub/data", text.replace("%", "1").replace("^", "2")), times=6)
    has_times = "timestamp" in text  # its objects are readings of one device, whatever their place
    assert bool(hints_of(tmp_path / "alone", alone)) == has_times


SINGLE = {
    "the address of a house": '{"address":"Road %","lat":5#.5}',
    "an address of the internet": '{"address":"10.0.0.%","rssi":-5#}',
    "a counter": '{"id":#,"t":21.5}',
    "a counter that wraps around": '{"id":$,"t":21.5}',
    "a message id": '{"message":{"id":"m#"},"t":21.5}',
    "a user of a reader of cards": '{"user":"u%","uid":"04A#","t":21.5}',
    "a card": '{"id":"04A%","access":true,"ts":1790000000}',
    "a network": '{"ssid":"net%","rssi":-6#}',
    "an event with several messages": '{"id":"e@","score":0.#}',
    "a firmware": '{"firmware":{"id":"f@@"},"t":21.5}',
    "a device that was replaced": '{"mac":"AC0&","t":21.5}',
    "objects that a camera tracks": '[{"id":"o@","x":#},{"id":"p@","x":#}]',
    "texts that are no names": '{"name":"song @","volume":4#}',
}


@pytest.mark.parametrize("about", SINGLE)
def test_a_field_that_is_no_device_is_not_told(tmp_path: Path, about: str) -> None:
    signs = {"#": 1, "@": 3, "&": 30}
    messages = []
    for number in range(MESSAGES_PER_TOPIC):
        text = SINGLE[about].replace("$", str(number % 16)).replace("%", str(number % 2))
        for sign, length in signs.items():
            text = text.replace(sign, str(number // length))
        messages.append(("one", text))
    assert hints_of(tmp_path, messages) == []


TOLD_FLEETS = {"two sensors at one receiver",
               "a gateway, and readings of the same devices elsewhere"}  # fmt: skip


@pytest.mark.parametrize("name", [*FLEETS, *BELIEFS])
def test_only_fleets_with_several_devices_below_a_topic_are_told(tmp_path: Path, name: str) -> None:
    messages: list[tuple[str, bytes]] = []
    if name in FLEETS:
        messages = FLEETS[name][0] * 3
    else:
        payload = BELIEFS[name][0].replace("%", "1").replace("$", "@")
        messages = [("d/1", payload.replace("@", str(at)).encode()) for at in range(10)]
    found = [each for each in hints_of(tmp_path, messages) if APART in each]
    assert bool(found) == (name in TOLD_FLEETS)


TOLD_MAKERS = {"two nodes that one gateway hears", "two sensors of one receiver",
               "the parts of a host"}  # fmt: skip


def test_of_all_makers_only_those_with_several_devices_below_a_topic_are_told(
    tmp_path: Path,
) -> None:
    folders = (Path(__file__).parents[3] / "data" / "devices", place("holdfast_lake/profiles"))
    told = set()
    for path in sorted(path for folder in folders for path in folder.glob("*.toml")):
        for number, example in enumerate(examples(path)):
            messages = [(topic, as_bytes(text)) for topic, text in example.messages * 10]
            found = hints_of(tmp_path / f"{path.stem}-{number}", messages)
            told |= {example.about for each in found if APART in each}
    assert told == TOLD_MAKERS


def test_a_sample_is_bounded_whatever_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = [(f"t/{n}", json.dumps({f"device_id{n}": n, "deviceId": n})) for n in range(3000)]
    hostile += [("odd", json.dumps(each)) for each in (
        [[{"mac": "A", "t": 1}] * 20 + [{"mac": {}}]], {"deviceId": {"a": []}}, [[]], 1e300, None,
        {"id": [1]}, [{"mac": None}, 5], {"": {"": 1}}, {"tag": {}, "value": 1})]  # fmt: skip
    hostile += [("alike", '{"deviceId":1}'), ("alike", '{"deviceId":"1"}')] * 5
    assert not any(APART in each for each in hints_of(tmp_path, [*hostile, ("b", b"\xff\xfe")]))
    sample = samples.Sample(tmp_path, lambda _: True)
    assert len(sample.topics()[0]) == samples.TOPICS_MAX
    messages = fleet(*METERS, times=400)
    assert "in 50 messages of 1 topic" in hints_of(tmp_path / "many", messages)[0]
    monkeypatch.setattr(samples, "BYTES_MAX", 1000)
    monkeypatch.setattr(samples, "BATCH_ROWS", 10)
    few = samples.Sample(tmp_path / "many", lambda _: True)
    (topic,) = few.topics()[0].values()
    assert 10 <= len(topic.messages) < MESSAGES_PER_TOPIC


def test_a_payload_of_many_fields_has_few_candidates() -> None:
    """Each is compared with all others, so thousands of them would take minutes."""
    fields = [f"p{number}.mac" for number in range(1000)]
    assert other_device_fields(fields) == [(each,) for each in fields[:FIELDS_MAX]]


def test_names_of_clients_cannot_change_a_terminal(tmp_path: Path) -> None:
    lines = fleet(*(("t\x1b[2J", text) for _, text in METERS), times=5)
    (hint,) = hints_of(tmp_path, lines)
    assert hint.isprintable()


def test_the_report_has_the_hints(tmp_path: Path) -> None:
    hints_of(tmp_path, fleet(*METERS, times=6))
    write_table(tmp_path, load_catalog().table("topics"), [])
    page = report(tmp_path, catalog())
    assert "<h2>Hints</h2>" in page
    assert "<li>readings: Message.ID has 2 values such as 100 and 200" in page
    assert "<h2>Hints</h2>" not in report(tmp_path, catalog(Rule("#")))
