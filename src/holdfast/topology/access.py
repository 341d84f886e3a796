"""Who asks, by the bearer token, and what they may."""

import hmac
from dataclasses import dataclass
from enum import Enum

from holdfast.topology.desired import Federation
from holdfast.topology.manager import hash_of

BEARER = "bearer "


class Role(Enum):
    OPERATOR = "operator"
    """Everything. Everybody is one while no token is configured."""
    MEMBER = "member"
    """Look, and speak for itself."""
    JOINER = "joiner"
    """Look for whom to measure, and join once."""


@dataclass(frozen=True)
class Caller:
    role: Role
    name: str
    """For the audit log."""
    member: int | None = None
    join_token: str = ""
    """The hash of a joiner's."""


class Unauthorized(Exception):
    """401: it is not known who asks."""


class Forbidden(Exception):
    """403: it is, and they may not."""


def caller_of(authorization: str, token: str, state: Federation, now_s: float) -> Caller:
    """`token` is the operator's, "" if nobody is asked for one. Raises Unauthorized."""
    if not token:
        return Caller(Role.OPERATOR, "anonymous")
    if not authorization.lower().startswith(BEARER):
        raise Unauthorized("send a token: Authorization: Bearer TOKEN")
    given = authorization[len(BEARER) :].strip()
    if hmac.compare_digest(given.encode(), token.encode()):
        return Caller(Role.OPERATOR, "operator")
    # Hashes of random tokens: to find one by its hash tells nothing about the others.
    hashed = hash_of(given)
    for member in state.members.values():
        if member.token_hash == hashed:
            return Caller(Role.MEMBER, f"member {member.id}", member.id)
    join_token = state.tokens.get(hashed)
    if join_token is None:
        raise Unauthorized("this token is not known: it was mistyped, or its member was removed")
    if join_token.used_by is not None:
        raise Unauthorized(
            f"this join token has been used by member {join_token.used_by}: make a new one"
        )
    if join_token.expires_at_s <= now_s:
        raise Unauthorized("this join token has expired: make a new one")
    return Caller(Role.JOINER, f"join token {hashed[:8]}", join_token=hashed)


def require_operator(caller: Caller) -> None:
    """Raises Forbidden."""
    if caller.role is not Role.OPERATOR:
        raise Forbidden("this takes the operator's token")


def require_member(caller: Caller, node: int) -> None:
    """Raises Forbidden for anybody but this member and the operator."""
    if caller.role is not Role.OPERATOR and caller.member != node:
        raise Forbidden(f"this takes the token of member {node}, or the operator's")
