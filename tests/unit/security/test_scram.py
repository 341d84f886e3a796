"""SCRAM against RFC 7677's example, and everything a peer may get wrong."""

import base64
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.security.enhanced_authentication import (
    Continue,
    Failure,
    ScramAuthenticator,
    Success,
    scram_factories,
)
from holdfast.security.scram import ScramClient, ScramServer
from holdfast.security.scram_file import (
    HASHES,
    ScramCredentials,
    ScramError,
    ScramFile,
    make_credentials,
    new_decoy_line,
    parse_credentials,
    saslprep,
)

SHA_512 = "SCRAM-SHA-512"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
PENCIL = make_credentials("pencil", salt=SALT)
CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"


def lookup(username: str) -> ScramCredentials:
    return PENCIL


def server() -> ScramServer:
    return ScramServer(lookup, lambda: SERVER_NONCE)


def test_rfc_7677_example() -> None:
    client = ScramClient("user", "pencil", lambda: CLIENT_NONCE)
    exchange = server()
    first = client.first()
    assert first == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    challenge = exchange.start(first)
    assert challenge == (
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    final = client.final(challenge)
    assert final == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    verdict = exchange.finish(final)
    assert verdict == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    client.verify(verdict)
    assert exchange.username == "user"


def test_sha_512_as_the_library_scramp_has_it() -> None:
    salt = base64.b64decode("Yin2FuHTt/M0kJWb0t9OI32n2VmOGi3m+JfjOvuDF88=")
    credentials = make_credentials("pencil", salt=salt, method=SHA_512)
    client = ScramClient("user", "pencil", lambda: CLIENT_NONCE, SHA_512)
    exchange = ScramServer(lambda name: credentials, lambda: SERVER_NONCE)
    final = client.final(exchange.start(client.first()))
    assert final.endswith(
        b"p=/3obeUE1tHCJjbQttd+ChF5ox2IU1rNjj2wVDnbQ5LdNT126oy4QgLz2tHw/Uj7Gwb6PRuHOS3HC+45exxT58A=="
    )
    client.verify(exchange.finish(final))


def test_the_record_of_an_earlier_version_verifies() -> None:
    record = (
        "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$"
        "WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
    )
    file = ScramFile.parse(f"# decoy:c2VjcmV0\nuser:{record}", "f")
    assert file.lookup("user").format() == record
    exchange = ScramServer(file.lookup)
    client = ScramClient("user", "pencil")
    client.verify(exchange.finish(client.final(exchange.start(client.first()))))


def test_the_salt_of_an_unknown_user_is_that_of_an_earlier_version() -> None:
    known = make_credentials("pencil", salt=b"0123456789abcdef")
    file = ScramFile.parse(f"# decoy:c2VjcmV0\na:{known.format()}", "f")
    assert base64.b64encode(file.lookup("nobody").salt) == b"rPIfUj+4KYFhu6viiZo2Ww=="


def test_a_user_with_both_methods() -> None:
    lines = [f"user:{make_credentials('pencil', method=method).format()}" for method in HASHES]
    file = ScramFile.parse("\n".join([new_decoy_line(), *lines]), "f")
    assert (len(file), file.methods) == (2, list(HASHES))
    for method, factory in scram_factories(file).items():
        authenticator = factory()
        assert authenticator.method == method
        client = ScramClient("user", "pencil", method=method)
        step = authenticator.start("id", client.first())
        assert isinstance(step, Continue)
        done = authenticator.step(client.final(step.data))
        assert isinstance(done, Success)
        client.verify(done.data)
        decoy = file.lookup("nobody", method)
        assert decoy.method == method
        assert len(decoy.stored_key) == len(file.lookup("user", method).stored_key)
    assert file.lookup("nobody").salt != file.lookup("nobody", SHA_512).salt
    with pytest.raises(ScramError, match="already"):
        ScramFile.parse("\n".join([*lines, lines[1]]), "f")
    # Without a user of it the method is not offered.
    assert ScramFile.parse(lines[0], "f").methods == ["SCRAM-SHA-256"]
    assert ScramFile.parse("", "f").methods == ["SCRAM-SHA-256"]


def test_another_method_is_refused() -> None:
    with pytest.raises(ScramError, match="none of SCRAM-SHA-256, SCRAM-SHA-512"):
        ScramClient("user", "pencil", method="SCRAM-SHA-1")
    with pytest.raises(ScramError, match="credentials are"):
        parse_credentials(PENCIL.format().replace("SHA-256", "SHA-512"))


@given(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x24F), min_size=1, max_size=12),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x24F), min_size=1, max_size=12),
)
def test_any_name_and_password(username: str, password: str) -> None:
    try:
        credentials = make_credentials(password)
        client = ScramClient(username, password)
    except ScramError:
        return
    exchange = ScramServer(lambda name: credentials)
    if not saslprep(username):
        with pytest.raises(ScramError):
            exchange.start(client.first())
        return
    client.verify(exchange.finish(client.final(exchange.start(client.first()))))
    assert exchange.username == saslprep(username)


def test_a_wrong_password_is_refused() -> None:
    exchange = server()
    client = ScramClient("user", "pencils")
    final = client.final(exchange.start(client.first()))
    with pytest.raises(ScramError, match="wrong user name or password"):
        exchange.finish(final)
    with pytest.raises(ScramError, match="no exchange"):
        exchange.finish(final)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"", "client-first"),
        (b"n,,n=user", "client-first"),
        (b"x,,n=user,r=abc", "client-first"),
        (b"n,b=x,n=user,r=abc", "client-first"),
        (b"p=tls-unique,,n=user,r=abc", "channel binding"),
        (b"n,,m=ext,n=user,r=abc", "client-first"),
        (b"n,a=other,n=user,r=abc", "another user"),
        (b"n,,n=us=er,r=abc", "=3D"),
        (b"n,,n=,r=abc", "empty or malformed"),
        (b"n,,n=user,r=", "empty or malformed"),
        (b"n,,n=user,r=a b", "empty or malformed"),
        (b"n,,n=\xff,r=abc", "UTF-8"),
        (b"n,,n=a\0,r=abc", r"U\+0000"),
        (b"n,,n=" + b"u" * 5000 + b",r=abc", "the maximum is 4096"),
        ("n,,n=a\u0007,r=abc".encode(), r"U\+0007"),
    ],
)
def test_bad_client_first(message: bytes, text: str) -> None:
    with pytest.raises(ScramError, match=text):
        server().start(message)


def test_the_same_name_to_act_for_is_fine() -> None:
    exchange = server()
    exchange.start(b"y,a=us=2Cer,n=us=2Cer,r=abc,x=extension")
    assert exchange.username == "us,er"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b"c=biws", b"c=eSws", "channel binding is not"),
        (b"c=biws", b"c=!", "not base64"),
        (b"c=biws", b"d=biws", "client-final"),
        (b"r=rOpr", b"r=xOpr", "nonce is not"),
        (b"$k0,", b"$k0x,", "nonce is not"),
        (b"p=dHzb", b"p=eHzb", "wrong user name or password"),
        (b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=", b"p=YQ==", "32 bytes"),
        (b",p=", b",q=", "client-final"),
    ],
)
def test_bad_client_final(old: bytes, new: bytes, text: str) -> None:
    client = ScramClient("user", "pencil", lambda: CLIENT_NONCE)
    exchange = server()
    final = client.final(exchange.start(client.first()))
    assert old in final
    with pytest.raises(ScramError, match=text):
        exchange.finish(final.replace(old, new))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"r=abcX,s=c2FsdA==", "not a server-first"),
        (b"r=abc,s=c2FsdA==,i=4096", "did not extend"),
        (b"r=xyzabc,s=c2FsdA==,i=4096", "did not extend"),
        (b"r=abcX,s=c2FsdA==,i=4095", "allowed are 4096"),
        (b"r=abcX,s=c2FsdA==,i=99999999", "allowed are 4096"),
        (b"r=abcX,s=c2FsdA==,i=-1", "a number"),
        (b"r=abcX,s=?,i=4096", "not base64"),
    ],
)
def test_bad_server_first(message: bytes, text: str) -> None:
    with pytest.raises(ScramError, match=text):
        ScramClient("user", "pencil", lambda: "abc").final(message)


@pytest.mark.parametrize("message", [b"v=" + base64.b64encode(bytes(32)), b"", b"v=", b"x=1"])
def test_a_server_that_proves_nothing(message: bytes) -> None:
    client = ScramClient("user", "pencil", lambda: CLIENT_NONCE)
    with pytest.raises(ScramError, match="did not prove"):
        client.verify(b"v=")
    client.final(server().start(client.first()))
    with pytest.raises(ScramError, match="did not prove"):
        client.verify(message)
    with pytest.raises(ScramError, match="refused: other-error"):
        client.verify(b"e=other-error")


def test_saslprep_rfc_4013_examples() -> None:
    assert saslprep("I\u00adX") == "IX"
    assert saslprep("user") == "user"
    assert saslprep("USER") == "USER"
    assert saslprep("\u00aa") == "a"
    assert saslprep("\u2168") == "IX"
    assert saslprep("a\u00a0b") == "a b"
    for text in ["\u0007", "\u06271", "\u0627a\u0627", "\ud800", "\U0001f600"]:
        with pytest.raises(ScramError):
            saslprep(text)


def test_credentials_text() -> None:
    text = PENCIL.format()
    assert text.startswith("SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$")
    assert parse_credentials(text) == PENCIL
    for broken in ["", "x", text[1:], text + "$", text.replace("4096", "1"), text[:-4]]:
        with pytest.raises(ScramError, match="credentials are"):
            parse_credentials(broken)
    for iterations in (4095, 1_000_001):
        with pytest.raises(ScramError, match="iterations are"):
            make_credentials("x", iterations)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "scram"
    path.write_text(f"# users\n\nuser:{PENCIL.format()}\n")
    file = ScramFile.load(path)
    assert len(file) == 1
    assert file.lookup("user") == PENCIL
    for line, text in [
        ("other:x", "credentials are"),
        ("user", "a line is"),
        (f"user:{PENCIL.format()}", "already"),
        (f"\u0007:{PENCIL.format()}", r"U\+0007"),
    ]:
        path.write_text(f"user:{PENCIL.format()}\n{line}\n")
        with pytest.raises(ScramError, match=re.escape(f"{path}:2: ") + f".*{text}"):
            ScramFile.load(path)
    with pytest.raises(ScramError, match="No such file"):
        ScramFile.load(tmp_path / "missing")
    path.write_bytes(b"\xff")
    with pytest.raises(ScramError, match="not UTF-8"):
        ScramFile.load(path)


def test_an_unknown_user_looks_like_a_known_one() -> None:
    long_salt = make_credentials("x", 5000, b"s" * 24)
    lines = [new_decoy_line(), f"a:{PENCIL.format()}"]
    before = ScramFile.parse("\n".join(lines), "f")
    again = ScramFile.parse("\n".join([*lines, f"c:{PENCIL.format()}"]), "f")
    decoy = before.lookup("nobody")
    assert decoy == before.lookup("nobody")
    # The salt outlives a restart and other users' comings, as a real one does.
    assert decoy == again.lookup("nobody")
    assert decoy != before.lookup("somebody")
    assert decoy != ScramFile.parse(f"a:{PENCIL.format()}", "f").lookup("nobody")
    assert (len(decoy.salt), decoy.iterations) == (16, 4096)
    both = ScramFile.parse("\n".join([*lines, f"b:{long_salt.format()}"]), "f")
    shapes = {(len(c.salt), c.iterations) for c in map(both.lookup, map(str, range(50)))}
    assert shapes == {(16, 4096), (24, 5000)}


def test_an_unknown_user_fails_where_a_wrong_password_fails() -> None:
    file = ScramFile.parse(f"user:{PENCIL.format()}", "f")
    texts = []
    for username, password in [("user", "wrong"), ("nobody", "pencil")]:
        exchange = ScramServer(file.lookup)
        client = ScramClient(username, password)
        final = client.final(exchange.start(client.first()))
        with pytest.raises(ScramError) as caught:
            exchange.finish(final)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    empty = ScramFile.parse("", "f")
    assert empty.lookup("user").iterations == 4096


@pytest.mark.parametrize("first_word", [True, False])
def test_authenticator(first_word: bool) -> None:
    """client-first in CONNECT, or in an AUTH of its own"""
    authenticator = ScramAuthenticator(lookup)
    assert authenticator.method == "SCRAM-SHA-256"
    client = ScramClient("user", "pencil")
    if first_word:
        step = authenticator.start("id", client.first())
    else:
        assert authenticator.start("id", None) == Continue(b"")
        step = authenticator.step(client.first())
    assert isinstance(step, Continue)
    step = authenticator.step(client.final(step.data))
    assert isinstance(step, Success)
    assert step.username == "user"
    client.verify(step.data)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=4))
def test_authenticator_raises_nothing(messages: list[bytes | None]) -> None:
    authenticator = ScramAuthenticator(lookup)
    step: object = authenticator.start("id", messages[0] if messages else None)
    for message in messages[1:]:
        if not isinstance(step, Continue):
            break
        step = authenticator.step(message)
    assert isinstance(step, Continue | Failure)
