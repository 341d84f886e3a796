"""Messages of QoS 0 are in no table unless the log stores them: every command says so."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from holdfast.cli.main import build_parser, main
from holdfast.cli.serve import _overrides
from holdfast.client.blocking import Client
from holdfast.config.load import load
from holdfast.testing import InProcessBroker
from holdfast_lake.lake.lake import Lake
from tests.support.spark_free_lake import no_spark

HINT = "3 messages of QoS 0 were not stored since the servers have started, so no table has them."


def test_what_is_not_stored_is_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with InProcessBroker(admin=True, settings={"log.qos0": ["kept/#"]}) as broker:
        with Client("127.0.0.1", broker.port, client_id="c") as client:
            for number in range(3):
                client.publish("plant/temp", b"%d" % number, qos=0)
                client.publish("kept/temp", b"%d" % number, qos=0)
            client.publish("plant/temp", b"9", qos=1)
        source = {"servers": f"127.0.0.1:{broker.admin_port}"}
        lake = Lake(tmp_path / "lake", spark=no_spark())
        assert lake.run(["records", "readings"], source=source).errors == {}
        status = lake.status()
        assert status.qos0_hint.startswith(HINT)
        assert 'log.qos0 = ["zigbee2mqtt/#"]' in status.qos0_hint
        assert f"hint: {HINT}" in str(status)
        assert lake.backlog(["records"], source) == (0, status.qos0_hint)
        words = ["pipeline", "infer", "--from", source["servers"], "-o", str(tmp_path / "r.py")]
        assert main(words) == 0
        assert f"hint: {HINT}" in capsys.readouterr().err
        words = ["pipeline", "run", "records", "--lake", str(lake.path)]
        assert main(words) == 0
        assert capsys.readouterr().err.splitlines() == [f"hint: {status.qos0_hint}", "nothing new"]
    assert Lake(lake.path, spark=no_spark()).status(ask_servers=False).qos0_hint == ""


def test_serve_has_an_option_for_it() -> None:
    args = build_parser(["serve"]).parse_args(["serve", "--log-qos0", "a/#", "--log-qos0", "b/+"])
    assert load(None, {}, _overrides(args)).log.qos0 == ["a/#", "b/+"]
