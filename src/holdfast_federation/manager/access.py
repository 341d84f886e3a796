"""Identity and rights of callers, by a bearer token, a certificate, or both.

A certificate is identified by its name (`certificate_identity`). A member that has joined with one
is bound to that name: a caller with any token speaks for the member only if it shows a certificate
of this name. Members that share a name may speak for each other.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from holdfast_federation.manager.manager import hash_of
from holdfast_federation.manager.settings import ManagerSettings, is_named
from holdfast_federation.manager.state.federation_state import FederationState, Member

BEARER: Final = "bearer "


class Role(Enum):
    """The rights of a caller."""

    OPERATOR = "operator"
    """The role with all rights. Every caller has it while no credentials are configured."""
    MEMBER = "member"
    """The role of a member: it may read, and act for itself."""
    JOINER = "joiner"
    """The role of a newcomer: it may read the members to measure, and join. A token admits it once,
    a certificate as one member."""


@dataclass(frozen=True)
class ManagerCaller:
    """An authenticated caller of the REST interface."""

    role: Role
    name: str
    """The name in the audit log."""
    member: int | None = None
    """The id of the member whose token it presented."""
    join_token: str = ""
    """The hash of its join token."""
    certificate: str = ""
    """The name of its certificate; empty if none counts."""
    needs_token: bool = False
    """True if a certificate alone does not make it a member."""
    is_anonymous: bool = False
    """True for an operator without credentials, because none are configured."""

    @property
    def gives_token(self) -> bool:
        """True if a join gives the caller a token for all later requests."""
        return self.needs_token and self.role is not Role.MEMBER


class Unauthorized(Exception):
    """The caller is unknown: status 401."""


class Forbidden(Exception):
    """The caller is known and lacks the right: status 403."""


def caller_of(
    authorization: str,
    certificate: str,
    settings: ManagerSettings,
    state: FederationState,
    now_s: float,
) -> ManagerCaller:
    """Returns the caller of a request. Raises Unauthorized or Forbidden.

    `authorization`: the header, or empty. `certificate`: the name of the verified certificate, or
    empty.
    """
    match settings.access:
        case "certificate":
            return _by_certificate(authorization, certificate, settings, state)
        case "either" if certificate and not authorization:
            return _by_certificate(authorization, certificate, settings, state)
        case "either" if not authorization:
            raise Unauthorized("send a token (Authorization: Bearer TOKEN), or show a certificate")
        case "both":
            if not certificate:
                raise Unauthorized("show a certificate that has a name, and send a token")
            caller = _by_token(authorization, settings.token, state, now_s)
            if caller.role is Role.OPERATOR and not _is_operator(certificate, settings):
                raise Forbidden(f"certificate {certificate!r} is not that of an operator")
            name = f"{caller.name}, certificate {certificate}"
            return replace(caller, name=name, certificate=certificate)
    if not settings.token:
        return ManagerCaller(Role.OPERATOR, "anonymous", is_anonymous=True)
    return _by_token(authorization, settings.token, state, now_s)


def _is_operator(certificate: str, settings: ManagerSettings) -> bool:
    """True if the certificate belongs to an operator. Beside a token any certificate does, unless
    names are configured."""
    return certificate in settings.operators or not settings.operators


def _by_certificate(
    authorization: str, certificate: str, settings: ManagerSettings, state: FederationState
) -> ManagerCaller:
    """Returns the caller that the certificate identifies. Raises Unauthorized."""
    if not certificate:
        raise Unauthorized("show a certificate that has a common name, or another name")
    name = f"certificate {certificate}"
    if certificate in settings.operators:
        return ManagerCaller(Role.OPERATOR, name, certificate=certificate)
    # For a member that has joined before certificates were asked for.
    member = _member_of_token(authorization, state) if authorization else None
    is_member = any(each.certificate == certificate for each in state.members.values())
    return ManagerCaller(
        Role.MEMBER if is_member or member is not None else Role.JOINER,
        name,
        member=None if member is None else member.id,
        certificate=certificate,
    )


def _by_token(
    authorization: str, token: str, state: FederationState, now_s: float
) -> ManagerCaller:
    """Returns the caller that the token identifies. Raises Unauthorized."""
    if not authorization.lower().startswith(BEARER):
        raise Unauthorized("send a token: Authorization: Bearer TOKEN")
    given = _given(authorization)
    if hmac.compare_digest(given.encode(), token.encode()):
        return ManagerCaller(Role.OPERATOR, "operator", needs_token=True)
    member = _member_of_token(authorization, state)
    if member is not None:
        return ManagerCaller(Role.MEMBER, f"member {member.id}", member.id, needs_token=True)
    hashed = hash_of(given)
    join_token = state.tokens.get(hashed)
    if join_token is None:
        raise Unauthorized("this token is not known: it was mistyped, or its member was removed")
    if join_token.used_by is not None:
        raise Unauthorized(
            f"this join token has been used by member {join_token.used_by}: make a new one"
        )
    if join_token.expires_at_s <= now_s:
        raise Unauthorized("this join token has expired: make a new one")
    return ManagerCaller(
        Role.JOINER, f"join token {hashed[:8]}", join_token=hashed, needs_token=True
    )


def _given(authorization: str) -> str:
    return authorization[len(BEARER) :].strip()


def _member_of_token(authorization: str, state: FederationState) -> Member | None:
    # Hashes of random tokens: to find one by its hash tells nothing about the others.
    hashed = hash_of(_given(authorization))
    return next((each for each in state.members.values() if each.token_hash == hashed), None)


def require_operator(caller: ManagerCaller) -> None:
    """Admits an operator. Raises Forbidden for any other caller."""
    if caller.role is not Role.OPERATOR:
        raise Forbidden("this takes the operator's token or certificate")


def require_member(caller: ManagerCaller, member: Member) -> None:
    """Admits this member and operators. Raises Forbidden for any other caller."""
    if caller.role is Role.OPERATOR:
        return
    if member.certificate and caller.certificate != member.certificate:
        raise Forbidden(
            f"member {member.id} has joined with the certificate {member.certificate!r}: show that"
            " one"
        )
    if caller.member != member.id and (caller.needs_token or not member.certificate):
        raise Forbidden(f"this takes the token of member {member.id}, or the operator's")


def require_join(caller: ManagerCaller, uuid: str, ip: str, state: FederationState) -> None:
    """Raises Forbidden if the caller may not join so: a member returns as itself only and takes no
    other member's address. `ip` has the form in which members have it."""
    if caller.role is Role.OPERATOR:
        return
    known = state.by_uuid(uuid)
    there = state.by_ip(ip)
    itself = None if caller.member is None else state.members.get(caller.member)
    if itself is not None and uuid != itself.uuid:
        raise Forbidden(f"the token is that of member {itself.id}, which has another uuid")
    if itself is not None and there is not None and there.id != itself.id:
        raise Forbidden(f"{ip} is the broker of member {there.id}")
    for each in (known, there):
        # A join token lets its bearer be any member that is bound to no certificate.
        if each is not None and (each.certificate or not caller.needs_token):
            _require_to_be(caller, each)


def _require_to_be(caller: ManagerCaller, member: Member) -> None:
    if caller.join_token and caller.certificate == member.certificate:
        return
    try:
        require_member(caller, member)
    except Forbidden as error:
        raise Forbidden(
            f"that is member {member.id} already: {error}; the operator can remove it"
        ) from None


def require_broker(
    caller: ManagerCaller, ip: str, remote: str, patterns: Sequence[str], has_password: bool
) -> bool:
    """Returns whether the operator vouches for the address. Raises Forbidden for one that the
    manager does not connect to. `remote`: the caller's address."""
    if is_named(ip, patterns):
        return True
    if caller.role is Role.OPERATOR and (not caller.is_anonymous or _is_loopback(remote)):
        return True
    name = "HOLDFAST_TOPOLOGY__BROKERS"
    if has_password:
        raise Forbidden(
            f"the manager would log in at {ip}, for which the operator does not vouch: name it in"
            f" {name}, or join this member with the operator's token"
        )
    if (urlsplit(ip).hostname or "") != remote:
        raise Forbidden(
            f"{ip} is not at {remote}, where this comes from: name it in {name}, or join this"
            " member with the operator's token"
        )
    return False


def _is_loopback(remote: str) -> bool:
    try:
        return ip_address(remote).is_loopback
    except ValueError:
        return False
