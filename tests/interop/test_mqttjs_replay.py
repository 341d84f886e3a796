"""MQTT.js in Node.js as a client that reads the past: it knows nothing of Holdfast."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.brokers import Holdfast
from tests.support.mqttjs import NODE, NPM, installed

TIMEOUT_S = 60
pytestmark = pytest.mark.skipif(not (NODE and NPM), reason="no node or no npm")

SCRIPT = """
const mqtt = require(process.argv[2]);
const url = process.argv[3];
const seen = { named: [], latest: [] };
let live = false;
const finish = (code, text) => { console.log(JSON.stringify(text)); process.exit(code); };
const failed = (error) => finish(1, String(error));
const publisher = mqtt.connect(url, { protocolVersion: 5 });
publisher.on("error", failed);
publisher.on("connect", async () => {
  for (let n = 0; n < 5; n++) await publisher.publishAsync("plant/a", `a${n}`, { qos: 1 });
  await publisher.publishAsync("plant/b", "b0", { qos: 2 });
  const named = mqtt.connect(url, { protocolVersion: 5 });
  const latest = mqtt.connect(url, { protocolVersion: 4 });
  const check = () => {
    if (seen.named.length === 8 && seen.latest.length === 3) finish(0, seen);
  };
  named.on("message", (topic, payload, packet) => {
    const told = packet.properties ? packet.properties.userProperties : undefined;
    seen.named.push([topic, payload.toString(), told ? told["hf-past"] || "live" : "end"]);
    if (topic === "$stream/end") publisher.publish("plant/a", "now", { qos: 1 });
    check();
  });
  latest.on("message", (topic, payload) => { seen.latest.push(payload.toString()); check(); });
  await latest.subscribeAsync("$stream/@last:1/plant/+", { qos: 1 });
  const wishes = { "stream-offset": "earliest", "hf-offset": "?1", "hf-end": "?1" };
  await named.subscribeAsync("plant/#", { qos: 1, properties: { userProperties: wishes } });
});
"""


def test_mqttjs_reads_the_past_and_goes_on_live(tmp_path: Path) -> None:
    library = installed(tmp_path / "npm")
    script = tmp_path / "replay.cjs"
    script.write_text(SCRIPT)
    broker = Holdfast(tmp_path)
    broker.start()
    try:
        done = subprocess.run(
            [str(NODE), str(script), str(library), f"mqtt://127.0.0.1:{broker.port}"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        broker.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)
    past = [each for each in seen["named"] if each[2] == "1"]
    assert [each[1] for each in past if each[0] == "plant/a"] == [f"a{n}" for n in range(5)]
    assert [each[1] for each in past if each[0] == "plant/b"] == ["b0"]
    assert seen["named"][6:] == [["$stream/end", "plant/#", "end"], ["plant/a", "now", "live"]]
    assert sorted(seen["latest"][:2]) == ["a4", "b0"]
    assert seen["latest"][2] == "now"
