"""The commands about clients, sessions and messages, with a real broker."""

import json
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.e2e.brokers import PROCESSES, Holdfast
from tests.e2e.cluster_processes import until
from tests.e2e.wire import DISCONNECT, Wire
from tests.support.api_client import Api


@pytest.fixture
def admin(broker: Holdfast) -> list[str]:
    return ["--admin", f"127.0.0.1:{broker.admin_port}"]


def test_lists_and_operations(
    broker: Holdfast, admin: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def lines(*arguments: str, code: int = 0) -> list[str]:
        assert main([*arguments, *admin]) == code
        # The client may be at another process of the broker.
        return capsys.readouterr().out.replace("n1-1", "n1").splitlines()

    def error(*arguments: str) -> str:
        assert main([*arguments, *admin]) == 2
        return capsys.readouterr().err

    with Wire(broker.port) as client:
        client.connect("bad\tname", expiry_s=100)
        client.subscribe(("in/#", 1), ("$share/g/in/#", 1))
        client.publish("kept/1", b"x", qos=1, retain=True)
        heading, row = lines("clients", "list", "--search", "BAD", "--sort", "queued")
        assert heading.startswith("client")
        assert row.startswith("bad\\tname")
        assert len(lines("subscriptions", "list", "--topic", "in/1")) == 3
        [_, group] = lines("groups", "list")
        assert group.startswith("$share/g/in/#")
        shown = lines("groups", "show", "$share/g/in/#")
        assert "members      1, connected 1" in shown
        assert any(line.endswith("bad\\tname  at n1, QoS 1, 0 messages inflight") for line in shown)
        [reply] = [json.loads("\n".join(lines("groups", "show", "$share/g/in/#", "--json")))]
        assert reply["members"]
        shown = lines("sessions", "show", "bad\tname")
        assert shown[0] == "client       bad\\tname"
        assert "             QoS 1  in/#" in shown
        [heading, _] = lines("sessions", "list", "--sort", "log-lag", "--descending")
        assert "log-lag" in heading
        assert any(" connected " in line for line in lines("sessions", "history", "bad\tname"))
        for what in ("storage", "limits", "drops"):
            assert lines("show", what)
            assert isinstance(json.loads("".join(lines("show", what, "--json"))), dict)
        assert any("limits.connections" in line for line in lines("show", "limits"))
        client.subscribe(("$queue/jobs/#", 1))
        assert "it has 1 members" in error("groups", "delete", "$queue/jobs/#")
        assert "it is no queue" in error("groups", "delete", "$share/g/in/#")
        assert "there is no shared group" in error("groups", "delete", "$queue/x")
        assert [line.split()[0] for line in lines("retained", "list", "kept/#")[1:]] == ["kept/1"]
        deleted = tmp_path / "deleted.json"
        deleted.write_text("\n".join(lines("retained", "delete", "kept/#")))
        assert len(lines("retained", "list", "kept/#")) == 1
        assert lines("retained", "restore", str(deleted)) == ["1 message was restored"]
        again = lines("retained", "restore", str(deleted), "--json")
        assert json.loads("\n".join(again))["restored"] == 0
        [first, second] = lines("retained", "restore", str(deleted))
        assert first == "0 messages were restored, 1 was not:"
        assert second.startswith("kept/1: ")

        client.publish("in/1", b"hello", qos=1)
        api = Api(broker.admin_port)
        record = api.get("trace", topic="in/1")["record"]
        shown = lines("log", "trace", f"{record['partition']}/{record['offset']}")
        assert any("published it at QoS 1" in line for line in shown)
        assert any(line.startswith("session") and "bad\\tname" in line for line in shown)
        [sentence] = lines("log", "why", "bad\tname", "in/1")
        # The packet id is known at the client's process.
        assert "packet id" in sentence or PROCESSES > 1

        client.publish("$delayed/1000/in/late", b"x", qos=1)
        [_, late] = lines("delayed", "list", "--search", "LATE")
        _, partition, offset, topic, *_ = late.split()
        assert topic == "in/late"
        [cancelled] = lines("delayed", "cancel", partition, offset)
        assert cancelled.startswith("the message to in/late that was due at 20")
        assert len(lines("delayed", "list")) == 1
        assert "no delayed message waits" in error("delayed", "cancel", partition, offset)

        assert lines("clients", "disconnect", "bad\tname", "--reason", "maintenance") == [
            "bad\\tname was disconnected from n1; its session stays"
        ]
        client.expect(DISCONNECT)
    until(lambda: not api.get("clients")["sessions"], "the client is gone")
    for _ in range(3):
        with Wire(broker.port) as again:
            again.connect("again")
    [_, most] = lines("show", "reconnects")
    assert most.split()[:2] == ["again", "3"]
    ban = ("clients", "ban", "--address", "2001:db8::1", "--for", "1h")
    [sentence] = lines(*ban)
    assert sentence.startswith("address 2001:db8::/64 is banned until 2")
    row = json.loads("\n".join(lines(*ban, "--json")))
    assert (row["scope"], row["name"], row["by"]) == ("address", "2001:db8::/64", "local")
    assert lines("clients", "bans", "--scope", "address")[1].split()[1] == "2001:db8::/64"
    assert lines("clients", "unban", "--address", "2001:db8::/64") == [
        "address 2001:db8::/64 may connect again: its ban was lifted"
    ]
    assert len(lines("clients", "bans")) == 1
    lines("clients", "unban", "nobody", code=2)
    assert lines("access", "may", "c", "publish", "t", "--user", "u") == [
        "client 'c' (user 'u') may publish to 't': there are no rules"
    ]
    lines("access", "may", "c", "publish", "$SYS/x", code=1)
    lines("access", "may", "c", "publish", "t/+", code=2)
    assert "no" in lines("sessions", "list")[1].split()
    dry = ("sessions", "move", "bad\tname", "end", "--dry-run")
    assert json.loads("\n".join(lines(*dry, "--json")))["dry_run"]
    [sentence] = lines(*dry)
    assert sentence.startswith("bad\\tname would move: ")
    [sentence] = lines("sessions", "end", "bad\tname")
    assert sentence.startswith("the session of bad\\tname has ended, with 3 subscriptions")
    [_, queue] = lines("groups", "list")
    assert queue.split()[:3] == ["$share/$queue/jobs/#", "0", "0"]
    lines("groups", "delete", "$queue/jobs/#")
    assert len(lines("groups", "list")) == 1
    assert len(lines("sessions", "list")) == 1
    lines("sessions", "show", "bad\tname", code=2)
    lines("sessions", "move", "x", "time", "--at", "noon", code=2)
