"""A sidecar that runs while its files change."""

import signal
import socket
import ssl
from pathlib import Path

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
