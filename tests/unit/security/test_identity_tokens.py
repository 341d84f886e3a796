"""Tokens as proof of identity: claims, signatures, keys that come and go, and garbage."""

import asyncio
import base64
import hmac
import json
import string
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc import jws, jwt
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from holdfast.security.acl import READ, WRITE
from holdfast.security.identity import keys as keys_module
from holdfast.security.identity.claims import (
    ClaimRules,
    Claims,
    TokenError,
    find_claim,
    identity_of,
)
from holdfast.security.identity.identity import (
    BAD_CREDENTIALS,
    Answer,
    ClientIdentity,
    LoginRefusal,
    LoginRequest,
)
from holdfast.security.identity.keys import COOLDOWN_S, STALE_S, KeysError, KeyStore, parse_keys
from holdfast.security.identity.tokens import TokenSource, is_token, read_header

NOW = 1_800_000_000.0
RSA = RSAKey.generate_key(2048, {"kid": "rsa"}, auto_kid=False)
EC = ECKey.generate_key("P-256", {"kid": "ec"})
ED = OKPKey.generate_key("Ed25519", {"kid": "ed"})
SECRET = OctKey.import_key("0123456789abcdef0123456789abcdef", {"kid": "secret"})


def key_set(*keys: Key, private: bool = False) -> bytes:
    entries = [key.as_dict(private=private or key.key_type == "oct") for key in keys]
    return json.dumps({"keys": entries}).encode()


def token(key: Key, algorithm: str, claims: Claims | None = None, **header: str) -> bytes:
    fields = {"alg": algorithm, "kid": key.kid or "", **header}
    full = {"sub": "alice", "exp": NOW + 60} | (claims or {})
    return jwt.encode(fields, full, key, algorithms=[algorithm]).encode()


def request(password: bytes, username: str | None = None) -> LoginRequest:
    return LoginRequest("c1", username, password, "", "127.0.0.1:1", "l")


def source(*keys: Key, algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")) -> TokenSource:
    store = KeyStore("keys", never, 300.0)
    store.set_keys(parse_keys(key_set(*keys), "keys"))
    return TokenSource(store, algorithms, ClaimRules(), clock=lambda: NOW)


async def never() -> bytes:
    raise AssertionError("the keys must not be fetched")


def ask(asked: TokenSource, password: bytes) -> Answer:
    async def run() -> Answer:
        try:
            return await asked.authenticate(request(password))
        finally:
            await asked.close()

    return asyncio.run(run())


@pytest.mark.parametrize(("key", "algorithm"), [(RSA, "RS256"), (EC, "ES256"), (ED, "EdDSA")])
def test_a_signed_token_is_accepted(key: Key, algorithm: str) -> None:
    answer = ask(source(RSA, EC, ED), token(key, algorithm))
    assert isinstance(answer, ClientIdentity)
    assert (answer.username, answer.rules, answer.expires_s) == ("alice", None, NOW + 70)


def refused(answer: Answer) -> str:
    assert isinstance(answer, LoginRefusal)
    assert answer.reason == BAD_CREDENTIALS
    return answer.text


def test_a_signature_by_another_key_is_refused() -> None:
    other = ECKey.generate_key("P-256", {"kid": "ec"})
    assert "signature" in refused(ask(source(EC), token(other, "ES256")))


def test_the_public_key_is_no_secret() -> None:
    """HS256 with the text of the public key, where both are allowed."""
    head = base64.urlsafe_b64encode(b'{"alg": "HS256", "kid": "rsa"}').rstrip(b"=")
    signed = head + b"." + token(RSA, "RS256").split(b".")[1]
    digest = hmac.digest(RSA.as_pem(private=False), signed, "sha256")
    forged = signed + b"." + base64.urlsafe_b64encode(digest).rstrip(b"=")
    asked = source(RSA, SECRET, algorithms=("RS256", "HS256"))
    assert "signature" in refused(ask(asked, forged))


def test_a_good_signature_of_something_else_is_refused() -> None:
    signed = jws.serialize_compact({"alg": "ES256", "kid": "ec"}, b"[1]", EC).encode()
    text = refused(ask(source(EC), signed))
    assert text == "the token's signature, header or claims cannot be used"


def test_an_algorithm_must_be_allowed() -> None:
    assert "not one of ES256, EdDSA, RS256" in refused(ask(source(SECRET), token(SECRET, "HS256")))
    none = b"eyJhbGciOiJub25lIn0." + token(EC, "ES256").split(b".")[1] + b"."
    assert "not one of" in refused(ask(source(EC), none))
    assert isinstance(
        ask(source(SECRET, algorithms=("HS256",)), token(SECRET, "HS256")), ClientIdentity
    )


def test_a_key_must_be_named_if_there_are_several() -> None:
    bare = jwt.encode({"alg": "ES256"}, {"sub": "a", "exp": NOW + 9}, EC).encode()
    assert "no key" in refused(ask(source(EC, RSA), bare))
    assert isinstance(ask(source(EC), bare), ClientIdentity)


@pytest.mark.parametrize("password", [b"", b"secret", b"a.b.c", b"eyJ.x"])
def test_a_password_is_no_token(password: bytes) -> None:
    assert ask(source(EC), password) is None


RULES = ClaimRules(issuer="https://idp", audience="broker", leeway_s=10.0)
GOOD: Claims = {"sub": "alice", "iss": "https://idp", "aud": "broker", "exp": NOW + 60}


def test_good_claims() -> None:
    found = identity_of({**GOOD, "aud": ["other", "broker"], "nbf": NOW + 9}, RULES, "c", NOW)
    assert found.username == "alice"
    assert identity_of({**GOOD, "exp": NOW - 9}, RULES, "c", NOW).expires_s == NOW + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"exp": NOW - 10}, "has expired"),
        ({"exp": None}, "must expire"),
        ({"exp": "tomorrow"}, "number of seconds"),
        ({"exp": True}, "number of seconds"),
        ({"exp": float("nan")}, "out of range"),
        ({"exp": float("inf")}, "out of range"),
        ({"exp": 10**400}, "out of range"),
        ({"nbf": NOW + 11}, "not valid yet"),
        ({"iss": "https://other"}, "another issuer"),
        ({"aud": "other"}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"aud": {"broker": 1}}, "another audience"),
        ({"sub": ""}, "must be the user name"),
        ({"sub": 7}, "must be the user name"),
        ({"sub": "x" * 2000}, "more than 1024 bytes"),
        ({"publish": 7}, "list of topic filters"),
        ({"publish": [7]}, "list of topic filters"),
        ({"publish": ["a/#/b"]}, "must be the last"),
        ({"subscribe": ["$share/g/a"]}, "rules are about topics"),
        ({"subscribe": ["a"] * 1001}, "more than 1000"),
        ({"sub": "a+b", "publish": ["%u/x"]}, "needs a name without"),
    ],
)
def test_bad_claims(change: Claims, text: str) -> None:
    with pytest.raises(TokenError, match=text):
        identity_of({**GOOD, **change}, RULES, "c", NOW)


def test_a_token_for_others_is_refused_also_without_an_audience() -> None:
    with pytest.raises(TokenError, match=r"security\.jwt\.audience"):
        identity_of({"sub": "a", "exp": NOW + 1, "aud": "x"}, ClaimRules(), "c", NOW)


def test_claims_are_rights() -> None:
    claims = {**GOOD, "publish": ["plant/%c/+"], "subscribe": "plant/#"}
    rules = identity_of(claims, RULES, "c1", NOW).rules
    assert rules is not None
    assert rules.can_write("plant/c1/x")
    assert not rules.can_write("plant/c2/x")
    assert rules.can_read("plant/c2/x")
    assert not rules.can_read("other")
    assert rules.verdict_on("plant/c1/x", WRITE).text() == "token: topic write plant/c1/+"
    assert rules.verdict_on("x", READ).text() == "no rule allows it"


def test_a_claim_with_dots_is_a_name_or_a_path() -> None:
    claims: Claims = {"a.b": 1, "c": {"d": {"e": 2}}}
    assert find_claim(claims, "a.b") == 1
    assert find_claim(claims, "c.d.e") == 2
    assert find_claim(claims, "c.x") is None
    assert find_claim(claims, "") is None


def test_a_file_without_a_key_that_signs_is_refused(tmp_path: Path) -> None:
    for text in (b"", b"[]", b'{"keys": []}', b'{"keys": [{"kty": "X"}]}', b"[" * 100_000, b"\xff"):
        with pytest.raises(KeysError, match=r"^keys: "):
            parse_keys(text, "keys")
    known = parse_keys(key_set(EC)[:-2] + b', {"kty": "future"}]}', "keys")
    assert [key.kid for key in known] == ["ec"]


class Site:
    """A site with a key set, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.data: bytes | None = None
        self.fetches = 0
        monkeypatch.setattr(keys_module.time, "monotonic", lambda: self.now)

    async def fetch(self) -> bytes:
        self.fetches += 1
        await asyncio.sleep(0)
        if self.data is None:
            raise OSError("the site is down")
        return self.data


def with_store(site: Site, run: Callable[[KeyStore], object]) -> None:
    async def inner() -> None:
        store = KeyStore("https://idp", site.fetch, 300.0)
        await run(store)  # type: ignore[misc]

    asyncio.run(inner())


def test_keys_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)

    async def run(store: KeyStore) -> None:
        site.data = key_set(EC)
        assert (await store.find("ec")).kid == "ec"
        site.data = key_set(RSA)
        with pytest.raises(TokenError, match="unknown key"):
            await store.find("rsa")
        site.now += COOLDOWN_S
        found = await asyncio.gather(*(store.find("rsa") for _ in range(20)))
        assert {key.kid for key in found} == {"rsa"}
        assert site.fetches == 2
        site.now += COOLDOWN_S
        with pytest.raises(TokenError, match="unknown key"):
            await store.find("ec")

    with_store(site, run)


def test_a_site_that_is_down_costs_little_and_its_keys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)

    async def run(store: KeyStore) -> None:
        with pytest.raises(TokenError, match="no keys"):
            await store.find("ec")
        site.now += COOLDOWN_S
        site.data = key_set(EC)
        await store.find("ec")
        site.data = None
        for _ in range(100):
            with pytest.raises(TokenError, match="unknown key"):
                await store.find("x")
        assert site.fetches == 2
        site.now += STALE_S - 1
        assert (await store.find("ec")).kid == "ec"
        site.now += 2
        with pytest.raises(TokenError, match="no keys"):
            await store.find("ec")

    with_store(site, run)


HEADERS = st.one_of(
    st.binary(max_size=60),
    st.text(string.printable, max_size=60).map(str.encode),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.dictionaries(st.sampled_from(["alg", "kid", "crit"]), inner, max_size=3),
        max_leaves=5,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(head=HEADERS, rest=st.binary(max_size=40))
def test_odd_headers_never_raise_anything_else(head: bytes, rest: bytes) -> None:
    for data in (head + b"." + rest, base64.urlsafe_b64encode(head) + b"." + rest):
        is_token(data)
        with suppress(TokenError):
            read_header(data)


MUTATED = token(EC, "ES256")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    position=st.integers(0, len(MUTATED) - 1),
    new=st.sampled_from(b"ABCXYZabcxyz0189-_.=~\x00\xff"),
    cut=st.integers(0, 3),
)
def test_a_changed_token_is_never_accepted(position: int, new: int, cut: int) -> None:
    changed = bytearray(MUTATED)
    changed[position] = new
    data = bytes(changed)[: len(changed) - cut]
    answer = ask(source(EC), data)
    # The last character of a part has bits that do not count, so some changes are none.
    padded = [part + b"=" * (-len(part) % 4) for part in data.split(b".")]
    if isinstance(answer, ClientIdentity):
        assert [base64.urlsafe_b64decode(part) for part in padded] == [
            base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)) for part in MUTATED.split(b".")
        ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["sub", "exp", "nbf", "aud", "iss", "publish", "subscribe"]),
                inner,
                max_size=7,
            )
        ),
        max_leaves=12,
    )
)
def test_odd_claims_never_raise_anything_else(claims: object) -> None:
    if isinstance(claims, dict):
        for rules in (RULES, ClaimRules()):
            with suppress(TokenError):
                identity_of(claims, rules, "c", NOW)
