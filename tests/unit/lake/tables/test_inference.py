"""Rules that are proposed from messages: by convention, by levels, and safe with any topic."""

import json
import re
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark.sql")

from holdfast.cli.main import main
from holdfast.client.log.lake.commits import CommitLog
from holdfast_lake.lake.catalog import load_tables
from holdfast_lake.lake.lake import Lake
from holdfast_lake.tables.inference import Proposal, infer, tables_file
from holdfast_lake.tables.readings import ReadingsFold
from holdfast_lake.tables.rules import Rule, with_defaults
from holdfast_lake.tables.topics import Topics
from tests.support.fold_log import TIME_US, Log
from tests.support.journal_files import Journal, record
from tests.unit.lake.lake.test_commits import commit

JSON = json.dumps({"v": 1}).encode()
Pairs = list[tuple[str, bytes]]
NASTY = 'a"\n/import os\n"""/'


def proposed(messages: Pairs) -> list[Proposal]:
    return infer([(topic, payload, TIME_US + at) for at, (topic, payload) in enumerate(messages)],
                 zone="Europe/Berlin")  # fmt: skip


def devices(messages: Pairs, tmp_path: Path) -> dict[str, str | None]:
    """The device of each topic by the proposed rules, from the file that they are written to."""
    file = tmp_path / "rules.py"
    file.write_text(tables_file(proposed(messages), {"messages": len(messages), "topics": 1}))
    (table,) = load_tables(file)
    assert isinstance(table.build, ReadingsFold)
    topics = Topics(table.build.rules)
    found = {}
    for topic, _ in messages:
        reader = topics[topic].reader
        found[topic] = None if reader is None or reader.device_of is None else (
            reader.device_of(topic, "")
        )  # fmt: skip
    return found


def test_a_level_that_tells_devices_apart(tmp_path: Path) -> None:
    messages = [(f"plant/line{n % 3}/dev-{n}/telemetry", JSON) for n in range(20)]
    assert devices(messages, tmp_path) == {t: t.split("/")[2] for t, _ in messages}
    # The same name in two lines is two devices.
    messages = [(f"plant/line{n % 3}/press{n // 3}/telemetry", JSON) for n in range(30)]
    assert devices(messages, tmp_path) == {t: t.removesuffix("/telemetry") for t, _ in messages}


def test_values_of_their_own_have_the_metric_in_the_last_level(tmp_path: Path) -> None:
    messages = [
        (f"site/line1/dev{n}/{metric}", b"21.5") for n in range(9) for metric in ("temp", "rpm")
    ]
    assert set(devices(messages, tmp_path).values()) == {f"dev{n}" for n in range(9)}
    (proposal,) = proposed(messages)
    assert proposal.rule == 'Rule("site/line1/+/+", device="level 3", metric="level 4")'


def test_conventions(tmp_path: Path) -> None:
    tasmota = [
        ("tele/plug/LWT", b"Online"), ("tele/plug/SENSOR", b'{"Time":"2026-11-22T18:00:00"}'),
        ("stat/plug/RESULT", b"{}"), ("cmnd/plug/POWER", b"ON"),
    ]  # fmt: skip
    assert list(devices(tasmota, tmp_path).values()) == ["plug", "plug", "plug", None]
    zigbee = [
        ("z2m/bridge/state", b"online"), ("z2m/lamp", JSON), ("z2m/lamp/availability", b"online"),
        ("homeassistant/sensor/x/config", JSON),
    ]  # fmt: skip
    assert list(devices(zigbee, tmp_path).values()) == [
        "z2m/bridge", "lamp", "lamp", None
    ]  # fmt: skip


def test_a_gateway_names_its_devices_in_the_payload() -> None:
    messages = [
        (f"gateway/{n % 2}/up", json.dumps({"deviceId": f"d{n}", "v": 1}).encode())
        for n in range(10)
    ]
    (proposal,) = proposed(messages)
    assert proposal.rule == 'Rule("gateway/+/up", device="field deviceId")'


@pytest.mark.parametrize("messages", [[], [("a", b"")], [("$SYS/x", b"1")], [("spBv1.0/G/x", b"")]])
def test_nothing_to_propose(messages: Pairs) -> None:
    assert proposed(messages) == []


def test_names_of_topics_cannot_become_code(tmp_path: Path) -> None:
    messages = [(f"{NASTY}{n}", JSON) for n in range(5)]
    assert set(devices(messages, tmp_path).values()) == {str(n) for n in range(5)}


def test_the_command_reads_the_newest_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / "data", partitions=2)
    for number in range(40):
        topic = f"old/{number}" if number < 20 else f"plant/dev{number}/json"
        journal.append(number % 2, [record(topic, JSON)])
    rules = tmp_path / "rules.py"
    words = ["pipeline", "infer", "--from", journal.address, "-o", str(rules)]
    assert main([*words, "--messages", "20"]) == 0
    assert "1 rules from 20 messages of 20 topics" in capsys.readouterr().out
    assert "# 20 devices, such as dev20, dev21; 1 metric, such as v" in rules.read_text()
    assert main(words) == 2  # an own file is not replaced
    assert "cannot be written: File exists" in capsys.readouterr().err


def test_a_profile_of_ones_own_that_fits_no_topic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / "data", partitions=1)
    journal.append(0, [record("mine/dev/json", JSON)])
    for name in ("mine", "other"):
        text = f"title = '{name}'\nfound = [{{topic = '{name}/+/json'}}]\n"
        text += f"[[rule]]\nfilter = '{name}/+/json'\ndevice = 'level 2'\n"
        (tmp_path / f"{name}.toml").write_text(text)
    rules = tmp_path / "rules.py"
    words = ["pipeline", "infer", "--from", journal.address, "-o", str(rules)]
    assert main([*words, "--profiles", str(tmp_path)]) == 0
    (hint,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hint")]
    assert hint.startswith(f"hint: {tmp_path / 'other.toml'}: no topic of these messages")
    assert "mine/+/json" in rules.read_text()


def test_the_command_that_is_printed_works_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new lake needs its source, and one with rows is not run by other rules."""
    journal = Journal(tmp_path / "data", partitions=1)
    for number in range(9):
        journal.append(0, [record(f"plant/dev{number}/json", JSON)])
    source, lake = journal.address, tmp_path / "a lake"

    def printed(name: str) -> str:
        words = ["pipeline", "infer", "--from", source, "--lake", str(lake), "-o", name]
        assert main(words) == 0
        return capsys.readouterr().out.splitlines()[-1].strip()

    first, second = str(tmp_path / "1.py"), str(tmp_path / "2.py")
    assert printed(first) == (
        f"holdfast pipeline run --from {source} --lake '{lake}' --tables {first}"
    )
    Lake(lake).remember({"servers": source})
    for name in ("records", "readings"):
        CommitLog(lake, name).record(commit(1, table=name, rows_total=1))
    assert printed(second) == (
        f"holdfast pipeline rebuild readings --lake '{lake}' --tables {second}"
    )


def fleet(*parts: tuple[str, str], times: int = 3) -> Pairs:
    """Some messages of each topic. `#` in a payload is the number of the message."""
    return [(topic, payload.replace("#", str(at)).encode())
            for at in range(times) for topic, payload in parts]  # fmt: skip


FLEETS: dict[str, tuple[Pairs, set[str]]] = {
    "three plugs of Shelly": (
        fleet(*((f"plus1pm-{n}/status/{part}", text) for n in (1, 2, 3) for part, text in (
            ("switch:0", '{"id":0,"apower":#.5}'), ("sys", '{"mac":"A","uptime":#}'),
            ("wifi", '{"rssi":-#}')))),
        {"plus1pm-1", "plus1pm-2", "plus1pm-3"},
    ),
    "two boards of ESPHome": (
        fleet(("attic/sensor/bme_t/state", "21.#"), ("garage/sensor/bme_t/state", "7.#"),
              ("attic/sensor/bme_h/state", "4#")),
        {"attic", "garage"},
    ),
    "a Victron": (
        fleet(("N/c06/solarcharger/1/Yield/Power", '{"value":48#}'), ("N/c06/battery/2/Soc",
              '{"value":8#}'), ("N/c06/heartbeat", '{"value":179000000#}')),
        {"c06"},
    ),
    "two plugs with the topic first": (
        fleet(("plug1/tele/SENSOR", '{"ENERGY":{"Power":#}}'),
              ("plug2/tele/SENSOR", '{"ENERGY":{"Power":#}}'), ("plug1/tele/LWT", "Online")),
        {"plug1", "plug2"},
    ),
    "two sensors at one receiver": (
        fleet(("rtl_433/pi/events", '{"model":"M","id":1,"t":#}'),
              ("rtl_433/pi/events", '{"model":"M","id":2,"t":#}')),
        {"M/1", "M/2"},
    ),
    "two doors": (
        fleet(("zigbee2mqtt/bridge/state", "online"), ("zigbee2mqtt/door", '{"contact":true}'),
              ("zigbee2mqtt/lamp", '{"contact":true}'), ("esp/door", '{"contact":#}'),
              ("esp/lamp", '{"contact":#}')),
        {"door", "lamp", "zigbee2mqtt/bridge", "esp/door", "esp/lamp"},
    ),
    "values and objects below one line": (
        fleet(("plant/line1/p1/temp", "2#.5"), ("plant/line1/p2/temp", "3#.5"),
              ("plant/line1/p1/data", '{"rpm":#}'), ("plant/line1/p2/data", '{"rpm":#}'),
              ("plant/line1/p1/mode", "auto"), ("plant/line1/p2/mode", "off")),
        {"p1", "p2"},
    ),
    "a plug and a lamp of one name, of two makers": (
        fleet(("zigbee2mqtt/bridge/state", "online"), ("zigbee2mqtt/desk", '{"power":#}'),
              ("wled/desk/g", "12#"), ("wled/desk/v", "<?xml version='1.0' ?>"),
              ("wled/desk/status", "offline"),
              ("tele/desk/LWT", "Online"), ("stat/desk/POWER", "ON"), ("sensors/desk/t", "2#.5"),
              ("sensors/hall/t", "2#.5")),
        {"zigbee2mqtt/bridge", "zigbee2mqtt/desk", "wled/desk", "desk", "sensors/desk",
         "sensors/hall"},
    ),
    "cameras": (
        fleet(("frigate/available", "online"), ("frigate/stats", '{"cameras":{"front":{"fps":#}}}'),
              ("frigate/front/person", "#"), ("frigate/back/person", "#")),
        {"frigate", "front", "back"},
    ),
    "two devices of The Things Stack": (
        fleet(*((f"v3/app/devices/soil-{n}/{kind}", '{"end_device_ids":{},"uplink_message":{"f_cnt"'
                 ':#,"decoded_payload":{"m":#}}}') for n in (1, 2) for kind in ("up", "join"))),
        {"soil-1", "soil-2"},
    ),
    "two relays in one Shelly": (
        fleet(("shellies/s25/relay/0/power", "1#.1"), ("shellies/s25/relay/1/power", "9#.1"),
              ("shellies/s25/online", "true")),
        {"s25"},
    ),
    "a gateway, and readings of the same devices elsewhere": (
        fleet(("gw/1/up", '{"device_id":"d1","v":#}'), ("gw/1/up", '{"device_id":"d2","v":#}'),
              ("site/d1/telemetry", '{"w":#}'), ("site/d2/telemetry", '{"w":#}'),
              ("site/d1/status", "online"), ("site/d2/status", "offline")),
        {"d1", "d2"},
    ),
    "inverters whose presence is a number, and a value of each": (
        fleet(*((f"inv/{name}/{part}", text) for name in ("a", "b") for part, text in (
            ("available", "2"), ("grid/P", "1#"), ("roof/P", "2#")))),
        {"a", "b"},
    ),
    "chargers with values and lists": (
        fleet(*((f"goe/{number}/{part}", text) for number in (31, 32) for part, text in (
            ("amp", "1#"), ("nrg", "[231,#]"), ("tma", "[21.5,#]"), ("cdi", '{"value":#}')))),
        {"31", "32"},
    ),
    "a station of three sensors, which are one device by its will": (
        fleet(("w/temp", "2#.5"), ("w/rain", "0.#"), ("w/hum", "4#"), ("w/LWT", "Online")),
        {"w"},
    ),
    "two logs of a station whose will is none of them": (
        fleet(("w/a", '{"v":#}'), ("w/b", '{"v":#}'), ("w/availability", "online")),
        {"a", "b", "w"},
    ),
    "online and offline of systems that share nothing else": (
        fleet(("ha/status", "online"), ("dev9/status", "offline"), ("dev10/connected", "2"),
              ("hm/connected", "1"), ("hm/a/b", "1"), ("modbus/raw", "5"), ("ecowitt/raw", "6"),
              ("ecowitt/x", "7"), ("gw1/LWT", "Online"), ("gw2/LWT", "Offline")),
        {"ha", "dev9", "dev10/connected", "hm/connected", "hm/a/b", "modbus/raw", "raw", "x", "gw1",
         "gw2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLEETS)
def test_a_fleet_has_its_devices_and_none_is_mixed(name: str) -> None:
    messages, expected = FLEETS[name]
    rules = [eval(each.rule, {"Rule": Rule}) for each in proposed(messages)]
    by_rules, by_default = Log(*rules), Log()
    for topic, payload in messages:
        by_rules.add(topic, payload)
        by_default.add(topic, payload)
    found = by_rules.read()
    mixed: dict[tuple[str, str], set[str]] = {}
    for row in found.readings:
        if "/events" not in row["topic"]:
            mixed.setdefault((row["device"], row["metric"]), set()).add(row["topic"])
    assert {key: topics for key, topics in mixed.items() if len(topics) > 1} == {}
    assert {row["device"] for row in found.readings} == expected
    assert len(found.quarantine) <= len(by_default.read().quarantine)


@pytest.mark.parametrize(
    ("topics", "rule"),
    [
        (("a/b/", "a/c/"), 'Rule("a/+/", device="level 2")'),
        (("a/b/", "a/b/x"), None),
        (("a//x", "a/b/x"), None),
        (("/a", "/b"), 'Rule("/+", device="level 2")'),
        (("/a/t", "/b/t"), 'Rule("/+/t", device="level 2", metric="level 3")'),
    ],
)
def test_an_empty_level_is_no_device_and_no_metric(
    topics: tuple[str, ...], rule: str | None
) -> None:
    found = proposed(fleet(*((topic, "#") for topic in topics)))
    assert [each.rule for each in found] == [rule] * (rule is not None)
    log = Log(Rule("a/+/#", device="level 2", metric="level -1"))
    for topic in ("a//x", "a/b/", "a/b/x"):
        log.add(topic, b"1")
    read = log.read()
    assert read.values() == [("b", "x", 1.0)]
    assert [row["code"] for row in read.quarantine] == ["device", "device"]


@pytest.mark.parametrize(
    ("texts", "device"),
    [
        (('{"Type":"S","Message":{"ID":12,"Use":#}}', '{"Type":"S","Message":{"ID":9,"Use":1}}'),
         "field Message.ID"),
        (('{"pos":{"id":1#,"v":#},"device":{"uniqueId":"a"}}',
          '{"pos":{"id":2#,"v":9},"device":{"uniqueId":"b"}}'), "field device.uniqueId"),
        (('{"NodeId":"ns=2;s=T","Value":{"Value":#}}', '{"NodeId":"ns=2;s=P","Value":{"Value":9}}'),
         "field NodeId"),
        (('{"IMEI":"35","t":#}', '{"IMEI":"36","t":9}'), "field IMEI"),
    ],
)  # fmt: skip
def test_a_device_may_be_named_inside_of_an_object(texts: tuple[str, ...], device: str) -> None:
    """Else the consumption of two meters at one receiver is one metric."""
    (found,) = proposed(fleet(*(("radio", text) for text in texts), times=5))
    assert f'device="{device}"' in found.rule
    alone = proposed(fleet(("radio", texts[0]), times=5))
    assert not any("device=" in each.rule for each in alone)


def test_each_value_has_the_name_of_its_topic_beside_others_of_its_device() -> None:
    """A presence that is a number is `available`, and a list below a device has its topic."""
    inverters, _ = FLEETS["inverters whose presence is a number, and a value of each"]
    chargers, _ = FLEETS["chargers with values and lists"]
    log = Log(*(eval(each.rule, {"Rule": Rule}) for each in proposed(inverters + chargers)))
    for topic, payload in inverters[:3] + chargers[:4]:
        log.add(topic, payload)
    assert {metric for _, metric, _ in log.read().values()} == {
        "available", "grid/P", "roof/P", "amp", "nrg.0", "nrg.1", "tma.0", "tma.1", "cdi.value",
    }  # fmt: skip


def test_a_broken_object_gives_the_others_no_longer_names() -> None:
    """All of a device's messages are on one topic."""
    messages = fleet(*((f"plant/line1/press{each}/data", '{"rpm":#,"on":true}') for each in "12"))
    messages.append(("plant/line1/press1/data", b'{"rpm":1,"on":tr'))
    (found,) = proposed(messages)
    assert found.rule == 'Rule("plant/line1/+/data", device="level 3", metric="level 4")'
    assert "2 metrics, such as on, rpm" in found.reason


def test_a_status_that_is_no_presence_has_the_levels_of_the_values_beside_it() -> None:
    parts = fleet(*((f"nut/{name}/{part}", text) for name in ("ups1", "ups2") for part, text in (
        ("battery/charge", "9#"), ("input/voltage", "23#"), ("ups/status", "OL CHRG")
    )))  # fmt: skip
    log = Log(*(eval(each.rule, {"Rule": Rule}) for each in proposed(parts)))
    for topic, payload in parts[:3]:
        log.add(topic, payload)
    assert log.read().values() == [
        ("ups1", "battery/charge", 90.0), ("ups1", "input/voltage", 230.0),
        ("ups1", "ups/status", "OL CHRG"),
    ]  # fmt: skip


def test_rules_of_a_maker_fit_nodes_that_come_later() -> None:
    """Except where they would take topics of others."""
    nodes = fleet(*((f"{node}-esp/sensor/t/state", "2#.5") for node in ("attic", "hall")))
    found = {each.rule for each in proposed(nodes)}
    assert 'Rule("+/+/+/state", device="level 1", metric="levels 2-3")' in found
    many = fleet(*((f"esp{at}/sensor/t/state", "2#.5") for at in range(300)))
    assert len(proposed(many)) < 10
    other = fleet(("plant/pump/p1/state", '{"v":#}'), ("plant/pump/p2/state", '{"v":#}'))
    filters = {each.rule.split('"')[1] for each in proposed(nodes + other)}
    assert {"attic-esp/+/+/state", "hall-esp/+/+/state"} <= filters


def test_roles_of_fields_are_found() -> None:
    now = TIME_US // 1_000_000
    parts = [(f"plant/{n}/data", b'{"when":%d,"fCnt":%d,"temp":"2%d.5","code":"007","v":%d}'
              % (now + at, 100 + at, at, at)) for at in range(9) for n in (1, 2)]  # fmt: skip
    (found,) = proposed(parts)
    assert found.rule == (
        'Rule("plant/+/data", time="when", sequence="fCnt", numbers=(\'temp\',), device="level 2")'
    )
    assert "the time is when; fCnt counts the messages; one field is a number in texts" in (
        found.reason
    )


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        ("2#,#", 'Rule("t/+", decimal=",", device="level 2")'),
        ("2#,0#", 'Rule("t/+", decimal=",", device="level 2")'),
        ("2#,4#", 'Rule("t/+", device="level 2")'),
        ("2#,1", 'Rule("t/+", device="level 2")'),
        ("2#,5 °C", 'Rule("t/+", decimal=",", device="level 2")'),
        ("1.23#,5 kWh", 'Rule("t/+", decimal=",", device="level 2")'),
        ("1,23#.5", 'Rule("t/+", decimal=".", device="level 2")'),
        ("1,23#", 'Rule("t/+", device="level 2")'),
        ("52.#,13.#", "decode=\"csv\", columns=('column_1', 'column_2')"),
        ("#,3,4", "decode=\"csv\", columns=('column_1', 'column_2', 'column_3')"),
        ("1790000000;2#,5", "columns=('ts', 'column_2'), delimiter=\";\", decimal=\",\""),
        ('{"t":"2#,5","n":"007"}', 'Rule("t/+", numbers=(\'t\',), decimal=",", device="level 2")'),
        ('{"t":"2#,5","p":"1#.5"}', "numbers=('t',), decimal="),
        ('{"t":"2#.5","n":"x"}', "numbers=('t',), device"),
        ('{"t":"1,23#"}', 'Rule("t/+", device="level 2")'),
    ],
)
def test_a_decimal_sign_needs_texts_that_show_it(payload: str, rule: str) -> None:
    (found,) = proposed(fleet(*((f"t/{name}", payload) for name in "ab"), times=6))
    assert rule in found.rule
    assert ("decimal sign" in found.reason) == ("decimal=" in rule)


def test_a_constant_sequence_and_a_time_that_is_none_are_turned_off() -> None:
    parts = fleet(*((f"mixer/{n}/state", '{"sequence":3,"time":"22:33","v":#}') for n in (1, 2)))
    (found,) = proposed(parts)
    assert "time=None" in found.rule
    assert "sequence=None" in found.rule


def test_only_binary_payloads_that_nothing_reads_are_left_out() -> None:
    """An ignored message is in no quarantine, so nobody would miss it."""
    cbor = bytes.fromhex("a261741a6acb0b6e6176fb4035800000000000")
    packed = bytes.fromhex("81a474656d70cb4035800000000000")
    messages = [
        ("gw/gas", b'{"v":7}'), ("gw/water", b'{"v":8,"ts":1790000000}'), ("gw/cbor", cbor),
        ("gw/packed", packed), ("gw/zlib", zlib.compress(b'{"v":1}')),
        ("gw/lines", b'{"v":1}\n{"v":2}\n'), ("gw/nul", b"21.5\0"), ("gw/latin", b"21.5 \xb0C"),
        ("gw/picture", b"\xff\xd8\xff\xe0\0\x10JFIF"),
    ]  # fmt: skip
    every = proposed(messages * 3)
    assert not any("no message yet" in each.reason for each in every)
    found = {each.rule.split('"')[1]: each.rule for each in every}
    assert found.pop("gw/packed") == 'Rule("gw/packed", decode="messagepack")'
    assert found.pop("gw/zlib") == 'Rule("gw/zlib", decode="zlib+json")'
    if find_spec("cbor2"):
        assert found.pop("gw/cbor") == 'Rule("gw/cbor", decode="cbor")'
    assert found.pop("gw/+") == 'Rule("gw/+", device="level 2")'
    assert set(found) <= {"gw/picture", "gw/cbor"}
    assert found["gw/picture"] == 'Rule("gw/picture", decode="ignore")'


def test_a_time_of_days_ago_is_a_time() -> None:
    """A device that was offline sends what it has kept."""
    then = (TIME_US // 1_000_000 - 3 * 86_400) // 10
    parts = fleet(*((f"logger/{n}/data", f'{{"ts":{then}#,"v":#}}') for n in (1, 2)))
    (found,) = proposed(parts)
    assert "time" not in found.rule


def test_lists_of_named_values_have_the_names() -> None:
    """Without it, the place in the list would be the name, and a change would mix the values."""
    text = (
        '{"values":[{"id":"Ch1.Temp","v":#,"q":true,"t":1790000000000},'
        '{"id":"Ch1.Rpm","v":9#,"q":false,"t":1790000000000}]}'
    )
    other = '{"values":[{"id":"Ch1.Rpm","v":7#,"q":true,"t":1790000000000}]}'
    messages = fleet(("iotgateway", text), ("iotgateway", other))
    (found,) = proposed(messages)
    assert "pairs=('id', 'v')" in found.rule
    log = Log(eval(found.rule, {"Rule": Rule}))
    for topic, payload in messages:
        log.add(topic, payload)
    rows = [(row["metric"], row["value_double"], row["value_boolean"])
            for row in log.read().readings]  # fmt: skip
    assert rows[:6] == [
        ("values.Ch1.Temp", 0.0, None), ("values.Ch1.Temp.q", None, True),
        ("values.Ch1.Temp.t", 1790000000000.0, None), ("values.Ch1.Rpm", 90.0, None),
        ("values.Ch1.Rpm.q", None, False), ("values.Ch1.Rpm.t", 1790000000000.0, None),
    ]  # fmt: skip
    assert not any(name.startswith("values.0") for name, *_ in rows)


TAGS: list[dict[str, Any]] = [{"mac": "T1", "temp": 20}, {"mac": "T2", "temp": -5}]
IN_TIME = [{"timestamp": 1_790_000_000, "mac": "G", "free": 9},
           *({"timestamp": 1_790_000_000, **tag} for tag in TAGS)]  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "inside", "rows"),
    [
        (IN_TIME, "", {"G.free": 9.0, "T1.temp": 20.0, "T2.temp": -5.0}),
        (TAGS, "", {"T1.temp": 20.0, "T2.temp": -5.0}),
        (TAGS, "obj", {"obj.T1.temp": 20.0, "obj.T2.temp": -5.0}),
    ],
)
def test_the_tags_that_a_gateway_hears_are_not_mixed(
    listed: list[dict[str, Any]], inside: str, rows: dict[str, float]
) -> None:
    """A gateway lists them as it hears them, so the first one is often another one."""
    orders = [listed, listed[::-1]]
    texts = [json.dumps({inside: each, "gmac": "G"} if inside else each) for each in orders]
    topic = "/gw/ac23/status" if listed is IN_TIME else "gw/1"
    (found,) = proposed(fleet(*((topic, text) for text in texts)))
    log = Log(eval(found.rule, {"Rule": Rule}))
    for text in texts:
        log.add(topic, text.encode())
    read = log.read()
    numbers = [(row["metric"], row["value_double"]) for row in read.readings
               if row["value_double"] is not None]  # fmt: skip
    assert sorted(numbers) == sorted([*rows.items()] * 2)
    assert not read.quarantine


def test_a_list_in_one_order_needs_no_names() -> None:
    cards = '{"cards":[{"name":"a","kwh":#},{"name":"b","kwh":1#}]}'
    assert not proposed(fleet(("charger/1", cards)))


def test_a_name_that_a_list_inside_has_twice_is_reported() -> None:
    log = Log(Rule("gw/#", pairs=("mac",)))
    log.add("gw/1", b'{"obj":[{"mac":"A","rssi":-1},{"mac":"A","rssi":-2}]}')
    log.add("gw/1", b'[{"mac":"A","rssi":-3},{"mac":"A","rssi":-4}]')
    log.add(
        "gw/1", b'[{"mac":"A","ts":1790000000,"rssi":-5},{"mac":"A","ts":1790000001,"rssi":-6}]'
    )
    log.add("gw/1", b'[{"rssi":-7},{"mac":5,"rssi":-8}]')
    read = log.read()
    assert [(metric, value) for _, metric, value in read.values()] == [
        ("obj.A.rssi", -2.0), ("A.rssi", -3.0), ("A.rssi", -4.0), ("A.rssi", -5.0),
        ("A.rssi", -6.0), ("0.rssi", -7.0), ("5.rssi", -8.0),
    ]  # fmt: skip
    assert [row["code"] for row in read.quarantine] == ["key"]


def test_a_column_that_may_name_devices_is_told() -> None:
    """Else the kitchen and the hall are one device, as are the sentences of NMEA."""
    rooms = fleet(("csv", "179000000#,hall,21.5"), ("csv", "179000000#,bath,2#.5"))
    (found,) = proposed(rooms)
    assert 'if column_2 names a device, device="field column_2", else they are mixed' in (
        found.reason
    )
    (alone,) = proposed(fleet(("csv", "179000000#,hall,21.5")))
    assert "mixed" not in alone.reason


def test_lines_of_cells_and_binary_payloads() -> None:
    lines = fleet(*((f"csv/{n}", "2026-09-21T14:13:20Z;#;21.5") for n in (1, 2)))
    found = proposed([*lines, *[("cam/front/jpg", b"\xff\xd8\xff")] * 3])
    assert [each.rule for each in found] == [
        'Rule("cam/front/jpg", decode="ignore")',
        "Rule(\"csv/+\", decode=\"csv\", columns=('ts', 'column_2', 'column_3'), delimiter=\";\", "
        'device="level 2")',
    ]


def test_topics_of_a_device_that_differ_above_the_last_level_are_two_metrics() -> None:
    parts = fleet(
        ("a/dev1/x/y", "1"), ("a/dev1/z/y", "2"), ("a/dev2/x/y", "3"), ("a/dev2/z/y", "4")
    )
    (found,) = proposed(parts)
    assert found.rule == 'Rule("a/+/+/y", device="level 2", metric="levels 3-4")'


@pytest.mark.parametrize(
    "topics",
    [
        # One node in each room, and one value of each node: next week there are two.
        ("zwave/Kitchen/Sensor/49/0/Air_temperature", "zwave/Hall/Lamp/37/0/currentValue"),
        ("solar/dtu/uptime", "solar/116180000001/rssi"),
    ],
)
def test_a_rule_that_would_mix_topics_that_come_later_is_not_proposed(topics: list[str]) -> None:
    rules = [eval(each.rule, {"Rule": Rule})
             for each in proposed(fleet(*((topic, "#") for topic in topics)))]  # fmt: skip
    known = Topics(with_defaults(rules))
    later = [re.sub("Sensor|Air_temp.*|uptime", "Other", each) for each in topics]
    later += [re.sub("Lamp|rssi", "Other", each) for each in topics]
    found: dict[tuple[str, str], str] = {}
    for topic in {*topics, *later}:
        reader = known[topic].reader
        assert reader is not None
        assert reader.device_of is not None
        key = reader.device_of(topic, ""), reader.metric_of(topic)
        assert found.setdefault(key, topic) == topic


def test_a_text_of_its_own_in_each_message_is_its_id() -> None:
    parts = [
        (f"shop/{n}/order", b'{"orderId":"o-%d%05d","buyer_id":"c-%05d","valid":"no doubt","v":%d}'
         % (n, at // 2, at // 2 % 3, at // 2)) for at in range(30) for n in (1, 2)
    ]  # fmt: skip
    (found,) = proposed(parts)
    assert 'id="orderId"' in found.rule  # each message came twice
    assert "orderId differs in every message" in found.reason
    # Two messages with one text, or none in a message: it is no id.
    for more in (b'{"orderId":"o-100001","v":77}', b'{"v":78}'):
        assert "id=" not in proposed([*parts, ("shop/1/order", more)])[0].rule
    # `message_id` needs no rule.
    texts = [(topic, text.replace(b"orderId", b"message_id")) for topic, text in parts]
    assert "id=" not in proposed(texts)[0].rule


def test_a_rule_without_messages_has_the_zone_of_its_makers_other_rules() -> None:
    # TIME_US is 14:13:20 of UTC, in the summer of Berlin.
    parts = fleet(("tele/plug/SENSOR", '{"Time":"2026-09-21T16:13:2#","P":#}'),
                  ("tele/plug/LWT", "Online"))  # fmt: skip
    rules = {each.rule for each in proposed(parts)}
    zone = 'time="Time", zone="Europe/Berlin")'
    assert {each.split('"')[1] for each in rules if each.endswith(zone)} == {"tele/#", "stat/#"}


def test_units_of_texts_and_of_other_fields_are_proposed(tmp_path: Path) -> None:
    parts = fleet(("a/dev@/a", '{"power":"2#.5 W","state":"#"}'),
                  ("b/dev@/b", '{"temp":2#,"temp_unit":"C","hum":4#,"id":"dev@"}'),
                  ("c/dev@/c", '{"state":"2#.5","attributes":{"unit_of_measurement":"°C"}}'),
                  ("d/dev@/d", '{"temp":2#,"hum":4#,"unit":"°C"}'),
                  ("e/dev@/e", '{"temp":2#,"unit":"°C"}'),
                  ("f/dev@/current", "1#A"))  # fmt: skip
    several = [(topic.replace("@", number), payload.replace(b"@", number.encode()))
               for topic, payload in parts for number in "12"]  # fmt: skip
    found = {each.rule.split('"')[1][0]: each for each in proposed(several)}
    assert "numbers=('power',)" in found["a"].rule
    assert "power (W)" in found["a"].reason
    assert "units={'temp': 'field temp_unit'}" in found["b"].rule
    assert "temp (°C)" in found["b"].reason
    assert "units={'state': 'field attributes.unit_of_measurement'}" in found["c"].rule
    assert "units" not in found["d"].rule
    assert 'of what is unit the unit? units={"...": "field unit"}' in found["d"].reason
    assert "units" not in found["e"].rule
    assert "temp (°C)" in found["e"].reason
    assert 'decode="number"' in found["f"].rule
    assert "numbers in A" in found["f"].reason
    file = tmp_path / "rules.py"
    file.write_text(tables_file(list(found.values()), {"messages": 1, "topics": 1}))
    (table,) = load_tables(file)
    log = Log(*table.build.rules)
    for topic, payload in several:
        log.add(topic, payload)
    read = log.read()
    assert not read.quarantine
    units = {(row["topic"][0], row["metric"], row["unit"]) for row in read.readings if row["unit"]}
    assert units == {("a", "power", "W"), ("b", "temp", "°C"), ("c", "state", "°C"),
                     ("e", "temp", "°C"), ("f", "current", "A")}  # fmt: skip


def test_units_show_that_the_last_level_is_the_metric() -> None:
    parts = fleet(("house/boiler/flow", "3#.5 °C"), ("house/boiler/pressure", "1.# bar"),
                  ("house/ups/load", "2#%"), ("house/car/mode", "eco"))  # fmt: skip
    (found,) = proposed(parts)
    assert found.rule == 'Rule("house/+/+", device="level 2", metric="level 3")'
    assert "flow (°C), load (%)" in found.reason


def test_a_decimal_comma_is_no_column() -> None:
    found = proposed(fleet(("de/oven/temp", "2#,5 °C"), ("de/oven/flow", "2#,5")))
    assert not any("csv" in each.rule for each in found)
    (lines,) = proposed(fleet(("plant/oven", "2#,5,7")))
    assert 'decode="csv"' in lines.rule


def test_senml_is_proposed_with_its_base_name_as_the_device() -> None:
    (named,) = proposed(
        fleet(("s/1", '[{"bn":"urn:a:","bt":1790000000,"n":"t","u":"Cel","v":2#}]'))
    )
    assert named.rule == 'Rule("s/1", decode="senml", device="field bn")'
    assert "1 device, such as urn:a; 1 metric, such as t (°C)" in named.reason
    (plain,) = proposed(fleet(*((f"s/{n}", '[{"n":"t","u":"Cel","v":2#}]') for n in "12")))
    assert plain.rule == 'Rule("s/+", decode="senml", device="level 2")'
    assert not proposed(fleet(("list/1", '[{"n":"a","v":1#}]')))


def test_units_that_were_announced_to_home_assistant() -> None:
    configs = [
        ("esp-a_temp", {"stat_t": "~/sensor/temp/state", "~": "attic", "unit_of_meas": "°C"}),
        ("esp-b_temp", {"stat_t": "cellar/sensor/temp/state", "unit_of_meas": "°C"}),
        ("esp-a_gas", {"stat_t": "hall/1/gas", "unit_of_meas": "m³"}),
        ("esp-b_gas", {"stat_t": "hall/2/gas", "unit_of_meas": "l"}),
        ("own", {"state_topic": "own/meter", "unit_of_measurement": "kWh",
                 "value_template": "{{ value_json.total['import'] | float }}"}),
        ("other", {"state_topic": "own/meter", "unit_of_measurement": "W",
                   "value_template": "{{ value_json['power'] }}"}),
        ("loop", {"state_topic": "own/meter", "unit_of_measurement": "V",
                  "value_template": "{{ value_json | first }}"}),
    ]  # fmt: skip
    device = {"state_topic": "room/x", "components": {
        "t": {"unit_of_measurement": "°F", "value_template": "{{ value_json.t }}"}, "u": None,
    }}  # fmt: skip
    messages = [(f"homeassistant/sensor/{name}/config", json.dumps(each).encode())
                for name, each in [*configs, ("room", device)]]  # fmt: skip
    messages += fleet(
        *((f"{node}/sensor/temp/state", "2#.5") for node in ("attic", "cellar")),
        *((f"hall/{number}/{name}", "2#.5") for number in (1, 2) for name in ("gas", "flow")),
        ("own/meter", '{"total":{"import":1#},"power":5,"x":1}'), ("room/x", '{"t":70}'),
    )  # fmt: skip
    rules = [eval(each.rule, {"Rule": Rule}) for each in proposed(messages)]
    log = Log(*rules)
    for topic, payload in messages:
        log.add(topic, payload)
    units = {(row["device"], row["metric"], row["unit"]) for row in log.read().readings}
    assert {each for each in units if each[2]} == {
        ("attic", "sensor/temp", "°C"), ("cellar", "sensor/temp", "°C"),
        ("own/meter", "total.import", "kWh"), ("own/meter", "power", "W"), ("room/x", "t", "°F"),
    }  # fmt: skip
    assert {("1", "gas", None), ("2", "gas", None)} < units


NOW = "2026-09-21T1"
"""The hour of TIME_US, which is 14:13:20, without its second digit."""
BELIEFS: dict[str, tuple[str, str, str]] = {
    # The payload, what its rule has, and what no rule may have.
    "a charge that grows is a value": ('{"soc":4@,"p":1}', "", "sequence"),
    "seconds since the start are a value": ('{"uptime":50@,"p":1}', "", "sequence"),
    "a meter's pulses are a value": ('{"counter":50@,"p":1}', "if counter counts",
                                     'Rule("d/1", s'),
    "a counter by its name": ('{"data":{"packetId":50@},"p":1}', 'sequence="data.packetId"', ""),
    "the hour of sunrise": (f'{{"sunrise":"{NOW}0:00:00Z","p":@}}', "", "time="),
    "the end of a token": ('{"expires":1790003600,"p":@}', "", "time="),
    "the begin of an hour": (f'{{"startsAt":"{NOW}4:00:00Z","p":@}}', "", "time="),
    "the last change": (f'{{"changed":"{NOW}4:13:00Z","p":@}}', "", "time="),
    "a time that moves": (f'{{"sampled":"{NOW}4:13:2@Z","p":@}}', 'time="sampled"', ""),
    "a time in minutes": (f'{{"sampled":"{NOW}4:1@","p":1}}', 'time="sampled"', ""),
    "local seconds since 1970": ('{"when":179000720@,"p":1}', "no zone corrects it", "zone="),
    "local time that says UTC": (f'{{"when":"{NOW}6:13:2@Z","p":1}}', "no zone corrects", "zone="),
    "the hour that autumn has twice": (
        '{"Time":"2026-10-25 02:#:00","p":1}', 'zone="Europe/Berlin"', "None"
    ),
    "times of the past without a zone": (
        f'{{"Time":"{NOW}0:5@:00","p":1}}', "if it is local, zone=", 'Time", zone='
    ),
    "the numbers of two devices below one topic": (
        '{"dev":"d%","seq":%0@,"p":1}', "sequence=None", ""
    ),
    "a number that wraps around": ('{"seq":$,"p":1}', "", "sequence"),
    "a version is no number": (
        '{"fw":"1.1@","swVersion":"2.@","p":"2@.5"}', "numbers=('p',)", "'fw'"
    ),
    "a number that is not there now": (
        '{"p":"2@.5","q":"$","r":"unavailable","s":"on@"}', "numbers=('p', 'q')", ""
    ),
    "a constant with a unit": ('{"u":"230 V","i":"3A","p":@}', "numbers=('u',)", ""),
    "cards come again": ('{"card_id":"000456@","p":1}', "", "id="),
    "so do short ids": ('{"id":"04A1B2C@","p":1}', "", "id="),
    "lines with a header": ("t,a,b\n179000000@,2,3@", 'decode="csv", time="t")', "columns="),
    "lines with a point behind a comma": ("179000000@,2.5,3", "columns=('ts', 'column_2', '", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BELIEFS)
def test_what_a_field_is_believed_to_be(name: str) -> None:
    payload, wanted, unwanted = BELIEFS[name]
    messages = []
    for at in range(10):
        text = payload.replace("@", str(at)).replace("%", str(1 + at % 2))
        no_number = '"unknown"' if at == 5 and '"$"' in text else str((250 + at) % 256)
        text = text.replace('"$"' if at == 5 else "$", no_number).replace("#", f"{at * 15 % 60:02}")
        # Autumn's hour is stored when it is, from 2026-10-25T00:00Z on.
        at_us = 1_792_886_400_000_000 + at * 900_000_000
        if "#" not in payload:
            at_us = TIME_US + at * 1_000_000
        messages.append(("d/1", text.encode(), at_us))
    found = infer(messages[:8], zone="Europe/Berlin")
    text = "\n".join(f"{each.rule} # {each.reason}" for each in found)
    assert wanted in text
    assert not unwanted or unwanted not in text


def test_a_name_beside_the_value_is_the_metric_and_one_beside_others_the_device() -> None:
    """Else the speed of a pump and the level of a tank would be averaged."""
    tags = ('{"tag":"Pump.Speed","value":90#,"unit":"rpm"}', '{"tag":"Tank.Level","value":#}')
    names = ('{"name":"bath","temp":2#}', '{"name":"hall","temp":1#}')
    parts = fleet(*(("plc", text) for text in tags), *(("ble", text) for text in names))
    rules = {each.rule for each in proposed(parts)}
    assert rules == {
        'Rule("plc", metric="field tag", value="value")', 'Rule("ble", device="field name")'
    }  # fmt: skip
    log = Log(*(eval(each, {"Rule": Rule}) for each in rules))
    for topic, payload in parts[:4]:
        log.add(topic, payload)
    rows = [(row["device"], row["metric"], row["value_double"], row["unit"])
            for row in log.read().readings if row["metric"] != "unit"]  # fmt: skip
    assert sorted(rows) == [
        ("bath", "temp", 20.0, None), ("hall", "temp", 10.0, None),
        ("plc", "Pump.Speed", 900.0, "rpm"), ("plc", "Tank.Level", 0.0, None),
    ]  # fmt: skip
    both = '[{"ts":1790000000,"tag":"a","value":#},{"ts":1790000000,"tag":"b","value":9}]'
    listed = fleet(*((f"l/{n}/x", both) for n in (1, 2)))
    assert [each.rule for each in proposed(listed)] == [
        'Rule("l/+/x", metric="field tag", value="value", device="level 2")'
    ]
    capitals = ('{"Tag":"Pressure","Value":#,"Quality":"Good"}', '{"Tag":"Speed","Value":9#}')
    (found,) = proposed(fleet(*((f"p/{n}/d", text) for n in (1, 2) for text in capitals)))
    assert found.rule == 'Rule("p/+/d", metric="field Tag", value="Value", device="level 2")'
    listed_inside = '{"Points":[{"Name":"a","Value":#},{"Name":"b","Value":9}]}'
    (found,) = proposed(fleet(("points", listed_inside)))
    assert found.rule == "Rule(\"points\", pairs=('Name', 'Value'))"
    own = fleet(*((f"p/{n}/d", f'{{"name":"press{n}","value":1#}}') for n in (1, 2)))
    assert [each.rule for each in proposed(own)] == ['Rule("p/+/d", device="level 2")']
    # The same name below two gateways is two devices, of which no rule makes one.
    two = fleet(*((f"gw/{n}", text) for n in (1, 2) for text in names))
    assert not any("name" in each.rule for each in proposed(two))


def test_a_device_that_writes_one_number_as_a_text_writes_all_of_them_so() -> None:
    """Particles of 7, 8 and 9 µg come again and again, as a mode of 1 and 2 does alone."""
    air = [
        {"pm02": str(7 + n % 3), "atmp": f"21.{n}", "boot": "6", "serialno": f"008{n % 2}"}
        for n in range(9)
    ]
    (proposal,) = proposed([("air/one", json.dumps(each).encode()) for each in air])
    assert "numbers=('pm02', 'atmp')" in proposal.rule
    mode = [("hvac/one", json.dumps({"mode": str(1 + n % 2)}).encode()) for n in range(9)]
    assert proposed(mode) == []
