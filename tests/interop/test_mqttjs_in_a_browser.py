"""MQTT.js, the client of web pages, in Chromium over WSS."""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.listeners_broker import ListenersBroker
from tests.e2e.test_reload import passwords_of
from tests.support.certificates import Authority
from tests.support.mqttjs import NPM, installed
from tests.support.ports import free_port

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 60.0
pytestmark = pytest.mark.skipif(not (CHROMIUM and NPM), reason="no chromium or no npm")

PAGE = """<!doctype html><title>test</title><script src="/mqtt.js"></script><script>
// The first result alone: two requests may arrive in another order.
let isDone = false;
const done = (result) => {
  if (!isDone) fetch("/done", {method: "POST", body: JSON.stringify(result)});
  isDone = true;
};
const received = [];
const client = mqtt.connect("URL", {
  username: "USER", password: "secret", protocolVersion: 5, reconnectPeriod: 0, clientId: "page",
});
client.on("error", (error) => done({error: String(error)}));
client.on("close", () => done({closed: true}));
client.on("message", (topic, payload, packet) => {
  received.push([topic, payload.toString(), packet.qos]);
  if (received.length === 3) done({received});
});
client.on("connect", () => client.subscribe("t/#", {qos: 2}, (error, granted) => {
  for (const qos of [0, 1, 2]) client.publish(`t/${qos}`, "é".repeat(40000 * qos) + qos, {qos});
}));
</script>"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library for browsers, from npm."""
    return installed(tmp_path_factory.mktemp("npm")) / "dist" / "mqtt.min.js"


class Site:
    """The web server of the page, and the browser that shows it. `result` is what the page sent
    first."""

    def __init__(self, library: Path, directory: Path) -> None:
        site = self
        self.page = ""
        self.result: Any = None
        self.arrived = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_library = self.path == "/mqtt.js"
                body = library.read_bytes() if is_library else site.page.encode()
                self.send_response(200)
                kind = "text/javascript" if is_library else "text/html; charset=utf-8"
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not site.arrived.is_set():
                    site.result = json.loads(body)
                    site.arrived.set()
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing: pytest shows what is printed."""

        self.server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"
        self._directory = directory
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def show(self, page: str, host: str = "127.0.0.1") -> Any:
        """The report of the page, in a browser that takes any certificate and finds the site at
        this host."""
        self.page = page
        self.arrived.clear()
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--ignore-certificate-errors", f"--user-data-dir={self._directory}"]
        command += [f"--host-resolver-rules=MAP {host} 127.0.0.1", "--remote-debugging-port=0"]
        browser = subprocess.Popen(
            [*command, f"http://{host}:{self.server.server_port}/"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert self.arrived.wait(TIMEOUT_S), "the page reports nothing"
        finally:
            browser.kill()
            browser.wait()
        return self.result


@pytest.fixture
def site(library: Path, tmp_path: Path) -> Iterator[Site]:
    made = Site(library, tmp_path / "profile")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_page_publishes_and_receives(site: Site, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue()
    passwords = tmp_path / "passwords"
    passwords_of(passwords, "alice")
    port, other = free_port(), free_port()
    secure = {"transport": "websocket", "certificate": server.certificate, "key": server.key}
    broker = ListenersBroker(
        tmp_path / "broker",
        [
            {"port": port, "allowed_origins": [site.origin], **secure},
            {"port": other, "allowed_origins": ["https://else.example"], **secure},
        ],
        {"security": {"password_file": str(passwords)}},
    )
    broker.start()
    try:
        page = PAGE.replace("URL", f"wss://127.0.0.1:{port}/mqtt")
        assert site.show(page.replace("USER", "alice")) == {
            "received": [[f"t/{qos}", "é" * 40000 * qos + str(qos), qos] for qos in range(3)]
        }
        refused = site.show(page.replace("USER", "mallory"))
        assert "Bad User Name or Password" in refused["error"]
        # A page of another site gets no connection.
        elsewhere = PAGE.replace("URL", f"wss://127.0.0.1:{other}/mqtt")
        assert site.show(elsewhere.replace("USER", "alice")) == {"closed": True}
        assert "HTTP 403" in broker.log_text()
    finally:
        assert broker.stop() == 0


def test_a_page_of_the_internet_reaches_no_broker_on_loopback(site: Site, tmp_path: Path) -> None:
    """Without a password and with default settings; a page of this machine is admitted."""
    port = free_port()
    broker = ListenersBroker(tmp_path / "broker", [{"port": port, "transport": "websocket"}])
    broker.start()
    try:
        page = PAGE.replace("URL", f"ws://127.0.0.1:{port}/mqtt")
        assert "received" in site.show(page)
        assert site.show(page, "site.example") == {"closed": True}
        assert "does not admit the page http://site.example:" in broker.log_text()
    finally:
        assert broker.stop() == 0
