"""Pre-shared keys: their file, and the identity of each connection."""

import gc
import ssl
import weakref
from pathlib import Path

import pytest

from holdfast.security import psk
from holdfast.security.psk import PskContext, PskObject, has_psk, load_keys, parse_keys, psk_context
from holdfast.security.tls import TlsError

needs_psk = pytest.mark.skipif(not has_psk(), reason="Python 3.13 has pre-shared keys")
KEY = bytes(range(16))


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "psk"
    path.write_text(f"# devices\n\ndev-1:{KEY.hex()}\r\ndév 2:0A\n")
    assert load_keys(path) == {"dev-1": KEY, "dév 2": b"\n"}
    with pytest.raises(TlsError, match="nowhere: cannot read the PSK file: No such file"):
        load_keys(tmp_path / "nowhere")
    path.write_bytes(b"\xff")
    with pytest.raises(TlsError, match="psk: not UTF-8 at byte 0"):
        load_keys(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dev", "a line is identity:key"),
        (":0a", "a line is identity:key"),
        ("dev:", "the key has 1 to 64 bytes"),
        ("dev:0a0", "the key has 1 to 64 bytes"),
        ("dev:0x5ec2e7", "the key has 1 to 64 bytes"),
        ("dev:0a 0b", "the key has 1 to 64 bytes"),
        (f"dev:{'5e' * 65}", "the key has 1 to 64 bytes"),
        (f"{'d' * 129}:0a", "an identity has at most 128 bytes"),
        ("one:0a", "the identity 'one' is there twice"),
    ],
)
def test_a_wrong_line_is_named_without_its_key(line: str, said: str) -> None:
    with pytest.raises(TlsError) as raised:
        parse_keys(f"one:0b\n{line}\n", "psk")
    assert str(raised.value).startswith("psk:2: ")
    assert said in str(raised.value)
    key = line.partition(":")[2]
    assert not key or key not in str(raised.value) or key == "0a"


@pytest.mark.skipif(has_psk(), reason="for Python without pre-shared keys")
def test_an_older_python_is_named() -> None:
    with pytest.raises(TlsError, match=r"need Python 3\.13 or later"):
        psk_context({})


def shake(
    server: PskContext,
    identity: str,
    key: bytes,
    version: str,
    session: ssl.SSLSession | None = None,
    client: ssl.SSLContext | None = None,
) -> tuple[PskObject, ssl.SSLObject, ssl.SSLContext]:
    """A handshake in memory. Raises `ssl.SSLError`."""
    if client is None:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
        client.set_ciphers("PSK")
        client.maximum_version = ssl.TLSVersion[version]
    client.set_psk_client_callback(lambda hint: (identity, key))  # type: ignore[attr-defined]
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, session=session)
    two = server.wrap_bio(to_server, to_client, server_side=True)
    assert isinstance(two, PskObject)
    pending: list[ssl.SSLObject] = [one, two]
    while pending:
        for each in list(pending):
            try:
                each.do_handshake()
                pending.remove(each)
            except ssl.SSLWantReadError:
                continue
    return two, one, client


@needs_psk
@pytest.mark.parametrize("version", ["TLSv1_2", "TLSv1_3"])
def test_the_identity_is_that_of_the_key(version: str) -> None:
    server = psk_context({"dev-1": KEY, "dév 2": b"other"}, "hint")
    for identity, key in (("dev-1", KEY), ("dév 2", b"other")):
        assert shake(server, identity, key, version)[0].psk_identity == identity
    for identity, key in (("dev-1", b"other"), ("dev-2", KEY), ("", KEY)):
        with pytest.raises(ssl.SSLError):
            shake(server, identity, key, version)
    assert server.ring.shaking is None
    # A reload leaves nothing behind.
    kept = weakref.ref(server)
    del server
    gc.collect()
    assert kept() is None


@needs_psk
def test_a_resumed_session_has_the_identity_of_its_first_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = psk_context({"dev-1": KEY})
    first, peer, client = shake(server, "dev-1", KEY, "TLSv1_2")
    assert first.psk_identity == "dev-1"
    again, _, _ = shake(server, "dev-1", KEY, "TLSv1_2", peer.session, client)
    assert again.session_reused
    assert again.psk_identity == "dev-1"
    # OpenSSL may know the session for longer: such a client has no name.
    monkeypatch.setattr(psk, "SESSIONS_MAX", 0)
    server.ring.remember(b"another", "dev-2")
    unknown, _, _ = shake(server, "dev-1", KEY, "TLSv1_2", peer.session, client)
    assert unknown.psk_identity == ""
