"""A sidecar that runs while its files change."""

import signal
import socket
import ssl
from pathlib import Path

import pytest

from tests.e2e.brokers import MOSQUITTO, Mosquitto
from tests.support.certificates import Authority, Certificate
from tests.support.ports import free_port
from tests.support.sidecars import Sidecar, wait_until


def shown_by(sidecar: Sidecar, context: ssl.SSLContext) -> bytes | None:
    """The certificate of the port for links."""
    with (
        socket.create_connection(("127.0.0.1", sidecar.port), 20) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return secured.getpeercert(binary_form=True)


def of_file(certificate: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(certificate.certificate).read_text())


def test_a_hangup_renews_the_certificate_of_links(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    used, renewed = authority.issue("used"), authority.issue("renewed")
    (tmp_path / "config").write_text(
        f"[federation]\ncertificate = '{used.certificate}'\nkey = '{used.key}'\n"
        f"ca = '{authority.ca}'\n"
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.ca)
    context.load_cert_chain(renewed.certificate, renewed.key)
    sidecar = Sidecar(tmp_path, free_port(), ["-c", str(tmp_path / "config")])
    sidecar.start()
    try:
        wait_until(lambda: "federator_ready" in sidecar.log_text(), "the start")
        before = of_file(used)
        assert shown_by(sidecar, context) == before
        assert sidecar.process is not None

        Path(used.certificate).write_text("no certificate")
        sidecar.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reload_failed" in sidecar.log_text(), "a refusal")
        assert shown_by(sidecar, context) == before

        Path(used.certificate).write_bytes(Path(renewed.certificate).read_bytes())
        Path(used.key).write_bytes(Path(renewed.key).read_bytes())
        sidecar.process.send_signal(signal.SIGHUP)
        text = "reloaded settings=['federation.certificate', 'federation.key']"
        wait_until(lambda: text in sidecar.log_text(), "the reload")
        assert shown_by(sidecar, context) == of_file(renewed)
        assert sidecar.stop() == 0
        assert "Traceback" not in sidecar.log_text()
    finally:
        sidecar.kill()


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
def test_a_hangup_renews_the_certificate_towards_the_broker(tmp_path: Path) -> None:
    """Mosquitto logs who connects. A connection that is there goes on; the next one is by the new
    certificate, also from an authority that was not trusted before."""
    authority, later = Authority(tmp_path), Authority(tmp_path, "later")
    used, renewed = authority.issue("used"), authority.issue("renewed")
    of_broker, of_broker_later = authority.issue("broker"), later.issue("broker")
    broker = Mosquitto(
        tmp_path,
        f"cafile {authority.ca}\ncertfile {of_broker.certificate}\nkeyfile {of_broker.key}\n"
        "require_certificate true\nuse_identity_as_username true\n",
    )
    broker.start()
    (tmp_path / "config").write_text(
        f"[edge]\ncertificate = '{used.certificate}'\nkey = '{used.key}'\nca = '{authority.ca}'\n"
    )
    sidecar = Sidecar(tmp_path, broker.port, ["-c", str(tmp_path / "config")])
    sidecar.broker = f"mqtts://127.0.0.1:{broker.port}"
    sidecar.start()
    try:
        wait_until(lambda: sidecar.get("/readyz"), "the broker is reached")
        assert "u'used'" in broker.log_text()
        assert sidecar.process is not None

        key = Path(used.key).read_bytes()
        Path(used.key).write_bytes(Path(renewed.key).read_bytes())
        sidecar.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "reload_failed" in sidecar.log_text(), "a key of another certificate")
        Path(used.key).write_bytes(key)
        broker.kill()
        broker.start()
        wait_until(lambda: sidecar.get("/readyz"), "it goes on with the old files")

        for path, new in (
            (used.certificate, renewed.certificate),
            (used.key, renewed.key),
            (of_broker.certificate, of_broker_later.certificate),
            (of_broker.key, of_broker_later.key),
        ):
            Path(path).write_bytes(Path(new).read_bytes())
        Path(authority.ca).write_text(Path(authority.ca).read_text() + Path(later.ca).read_text())
        sidecar.process.send_signal(signal.SIGHUP)
        text = "reloaded settings=['edge.ca', 'edge.certificate', 'edge.key']"
        wait_until(lambda: text in sidecar.log_text(), "the reload")
        assert "u'renewed'" not in broker.log_text()
        broker.kill()
        broker.start()
        wait_until(lambda: "u'renewed'" in broker.log_text(), "the new certificate")
        wait_until(lambda: sidecar.get("/readyz"), "the broker is reached again")
        assert sidecar.stop() == 0
        assert "Traceback" not in sidecar.log_text()
    finally:
        sidecar.kill()
        broker.kill()
