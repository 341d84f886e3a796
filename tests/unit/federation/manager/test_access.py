"""Who may do what, by token, by certificate, by either or both."""

import pytest

from holdfast.api.dispatch import document
from holdfast.api.endpoints import Call, Endpoint
from holdfast.config.problem import ConfigError
from holdfast.security.access.scopes import Scope
from holdfast_federation.manager.access import (
    Forbidden,
    ManagerCaller,
    Role,
    Unauthorized,
    caller_of,
    require_join,
    require_member,
)
from holdfast_federation.manager.api import EnvelopeForm, schemes_of
from holdfast_federation.manager.manager import hash_of
from holdfast_federation.manager.settings import PREFIX, ManagerSettings, load
from holdfast_federation.manager.state.federation_state import FederationState, JoinToken, Member

OPERATOR = "operator-token-of-the-test"
A, B, C = "tcp://a:1883", "tcp://b:1883", "tcp://c:1883"

STATE = FederationState(
    members={
        1: Member(id=1, ip=A, uuid="uuid-aaaa", certificate="site-a"),
        2: Member(id=2, ip=B, uuid="uuid-bbbb", token_hash=hash_of("token-b")),
        3: Member(
            id=3, ip=C, uuid="uuid-cccc", certificate="site-c", token_hash=hash_of("token-c")
        ),
    },
    tokens={hash_of("join"): JoinToken(expires_at_s=1e12)},
)


def settings(access: str, operators: str = "root") -> ManagerSettings:
    return ManagerSettings(access=access, token=OPERATOR, operators=operators.split())


def caller(
    access: str, token: str = "", certificate: str = "", operators: str = "root"
) -> ManagerCaller:
    header = f"Bearer {token}" if token else ""
    return caller_of(header, certificate, settings(access, operators), STATE, 0.0)


def speaks_for(who: ManagerCaller) -> set[int]:
    found = set()
    for member in STATE.members.values():
        try:
            require_member(who, member)
        except Forbidden:
            continue
        found.add(member.id)
    return found


def joins_as(who: ManagerCaller) -> set[str]:
    """As which members it may come, by their uuid and address."""
    found = set()
    for uuid, ip in (
        ("uuid-aaaa", A),
        ("uuid-bbbb", B),
        ("uuid-cccc", C),
        ("uuid-dddd", "tcp://d"),
    ):
        try:
            require_join(who, uuid, ip, STATE)
        except Forbidden:
            continue
        found.add(uuid[-1])
    return found


@pytest.mark.parametrize(
    ("access", "token", "certificate", "role", "members", "joins"),
    [
        ("certificate", "", "root", Role.OPERATOR, {1, 2, 3}, set("abcd")),
        ("certificate", "", "site-a", Role.MEMBER, {1}, set("ad")),
        ("certificate", "", "site-d", Role.JOINER, set(), set("d")),
        # Joined before certificates were asked for; its token says who it is until it joins again.
        ("certificate", "token-b", "site-b", Role.MEMBER, {2}, set("b")),
        ("certificate", "token-b", "site-a", Role.MEMBER, {1, 2}, set("b")),
        ("certificate", "token-c", "site-d", Role.MEMBER, set(), set()),
        # Tokens are nothing here.
        ("certificate", OPERATOR, "site-d", Role.JOINER, set(), set("d")),
        ("certificate", "join", "site-d", Role.JOINER, set(), set("d")),
        ("either", OPERATOR, "", Role.OPERATOR, {1, 2, 3}, set("abcd")),
        ("either", "", "root", Role.OPERATOR, {1, 2, 3}, set("abcd")),
        ("either", "", "site-a", Role.MEMBER, {1}, set("ad")),
        ("either", "token-b", "", Role.MEMBER, {2}, set("b")),
        ("either", "token-c", "", Role.MEMBER, set(), set()),
        ("either", "join", "", Role.JOINER, set(), set("bd")),
        ("either", "join", "site-a", Role.JOINER, set(), set("bd")),
        ("both", OPERATOR, "root", Role.OPERATOR, {1, 2, 3}, set("abcd")),
        ("both", "token-c", "site-c", Role.MEMBER, {3}, set("c")),
        ("both", "token-c", "site-a", Role.MEMBER, set(), set()),
        ("both", "token-b", "site-b", Role.MEMBER, {2}, set("b")),
        ("both", "join", "site-a", Role.JOINER, set(), set("abd")),
        ("both", "join", "site-d", Role.JOINER, set(), set("bd")),
    ],
)
def test_who_is_whom(
    access: str, token: str, certificate: str, role: Role, members: set[int], joins: set[str]
) -> None:
    who = caller(access, token, certificate)
    assert who.role is role
    assert speaks_for(who) == members
    assert joins_as(who) == joins


@pytest.mark.parametrize(
    ("access", "token", "certificate"),
    [
        ("certificate", OPERATOR, ""),
        ("certificate", "", ""),
        ("either", "", ""),
        ("either", "wrong", "root"),
        ("both", OPERATOR, ""),
        ("both", "", "root"),
        ("both", "wrong", "root"),
    ],
)
def test_who_is_nobody(access: str, token: str, certificate: str) -> None:
    with pytest.raises(Unauthorized):
        caller(access, token, certificate)


def test_with_both_the_operators_certificate_is_that_of_one() -> None:
    with pytest.raises(Forbidden, match="not that of an operator"):
        caller("both", OPERATOR, "site-a")
    assert caller("both", OPERATOR, "site-a", operators="").role is Role.OPERATOR


def test_a_member_takes_nobodys_address() -> None:
    for who in (caller("certificate", "", "site-a"), caller("both", "token-c", "site-c")):
        for ip in {A, B, C} - {STATE.members[3].ip if who.member == 3 else A}:
            with pytest.raises(Forbidden):
                require_join(who, "uuid-cccc" if who.member == 3 else "uuid-aaaa", ip, STATE)


def test_a_token_of_its_own_gets_who_joins_by_a_token() -> None:
    assert [
        caller(*each).gives_token
        for each in (
            ("both", "join", "site-d"), ("either", "join"), ("either", "", "site-d"),
            ("certificate", "", "site-d"), ("both", "token-c", "site-c"),
        )
    ] == [True, True, False, False, False]  # fmt: skip


FILES = {f"{PREFIX}CERTIFICATE": "c.pem", f"{PREFIX}KEY": "k.pem", f"{PREFIX}CLIENT_CA": "ca.pem"}
TOKEN = {f"{PREFIX}TOKEN": OPERATOR}
ROOT = {f"{PREFIX}OPERATORS": "root, admin"}


def with_access(access: str) -> dict[str, str]:
    return {f"{PREFIX}ACCESS": access}


def test_what_is_asked_for_by_default() -> None:
    assert load({}).access == load(TOKEN).access == "token"
    certified = load(FILES | ROOT | {f"{PREFIX}BIND": "0.0.0.0"})
    assert certified.access == "certificate"
    assert certified.operators == ["root", "admin"]
    assert load(FILES | TOKEN).access == "both"
    assert load(FILES | TOKEN | with_access("either")).access == "either"


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (with_access("nobody"), 'one of .*"token"'),
        (with_access("both") | TOKEN, "takes HOLDFAST_TOPOLOGY__CLIENT_CA"),
        (ROOT, "takes HOLDFAST_TOPOLOGY__CLIENT_CA"),
        ({f"{PREFIX}CLIENT_CA": "ca.pem"}, "takes HTTPS"),
        (FILES, "there would be no operator"),
        (FILES | ROOT | TOKEN | with_access("certificate"), "asks for no token"),
        (FILES | ROOT | with_access("either"), "takes a token"),
        (FILES | ROOT | with_access("both"), "takes a token"),
        (FILES | ROOT | TOKEN | with_access("token"), "leave client_ca out"),
    ],
)
def test_what_does_not_go_together(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(environ)


def test_openapi_says_what_is_asked_for() -> None:
    async def nothing(call: Call) -> None:
        """Does nothing."""

    bearer, certificate = {"bearer": []}, {"certificate": []}
    for access, has_token, security in (
        ("token", False, []),
        ("token", True, [bearer]),
        ("certificate", False, [certificate]),
        ("either", True, [bearer, certificate]),
        ("both", True, [bearer | certificate]),
    ):
        form = EnvelopeForm(schemes_of(access, has_token), lambda method: "")
        made = document([Endpoint("GET", "/x", Scope.VIEWER, "x", nothing)], "test", form)
        assert made["paths"]["/x"]["get"]["security"] == security
        assert set(made["components"]["securitySchemes"]) == {
            name for each in security for name in each
        }
    assert made["components"]["securitySchemes"]["certificate"]["type"] == "mutualTLS"
