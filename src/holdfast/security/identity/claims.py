"""Reads an identity from the claims of a verified token. Pure: the clock is an argument."""

import math
from typing import Final

from msgspec import Struct

from holdfast.security.acl import AclError, given_rules
from holdfast.security.identity.identity import ClientIdentity

FILTERS_MAX: Final = 1000
"""The most filters of a token, in each direction."""
USERNAME_BYTES_MAX: Final = 1024

Claims = dict[str, object]


class TokenError(ValueError):
    """A token that proves nothing here. The text has no part of it but names of claims."""


class ClaimRules(Struct, frozen=True):
    """The required claims, and the meaning of the others. An empty name is not looked up."""

    issuer: str = ""
    audience: str = ""
    leeway_s: float = 10.0
    username: str = "sub"
    publish: str = "publish"
    subscribe: str = "subscribe"


def identity_of(claims: Claims, rules: ClaimRules, client_id: str, now_s: float) -> ClientIdentity:
    """The identity that the claims prove at a time in seconds of Unix time. Raises `TokenError`."""
    expires_s = _check_times(claims, rules, now_s)
    _check_issuer(claims, rules)
    username = find_claim(claims, rules.username)
    if not isinstance(username, str) or not username or "\0" in username:
        raise TokenError(f"the claim {rules.username!r} must be the user name, a text")
    if len(username.encode("utf-8", "replace")) > USERNAME_BYTES_MAX:
        raise TokenError(f"the claim {rules.username!r} has more than {USERNAME_BYTES_MAX} bytes")
    publish = _filters(claims, rules.publish)
    subscribe = _filters(claims, rules.subscribe)
    if publish is None and subscribe is None:
        return ClientIdentity(username, "token", None, expires_s)
    try:
        rights = given_rules("token", publish or [], subscribe or [], username, client_id)
    except AclError as error:
        raise TokenError(str(error)) from None
    return ClientIdentity(username, "token", rights, expires_s)


def find_claim(claims: Claims, name: str) -> object:
    """The value of a claim, or None. A name with dots is also a path: `realm.roles`."""
    if not name:
        return None
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return found


def _check_times(claims: Claims, rules: ClaimRules, now_s: float) -> float:
    expires_s = _time(claims, "exp")
    if expires_s is None:
        raise TokenError("the token has no 'exp': it must expire")
    if expires_s + rules.leeway_s <= now_s:
        raise TokenError("the token has expired")
    begins_s = _time(claims, "nbf")
    if begins_s is not None and begins_s - rules.leeway_s > now_s:
        raise TokenError("the token is not valid yet ('nbf')")
    return expires_s + rules.leeway_s


def _time(claims: Claims, name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TokenError(f"the claim {name!r} must be a number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        raise TokenError(f"the claim {name!r} is out of range") from None
    if not math.isfinite(seconds) or not 0 <= seconds < 1e12:
        raise TokenError(f"the claim {name!r} is out of range")
    return seconds


def _check_issuer(claims: Claims, rules: ClaimRules) -> None:
    if rules.issuer and claims.get("iss") != rules.issuer:
        raise TokenError("the token is of another issuer ('iss')")
    audience = claims.get("aud")
    names = audience if isinstance(audience, list) else [audience]
    # RFC 7519, section 4.1.3: a token for others must be refused.
    if (rules.audience or audience is not None) and rules.audience not in names:
        wanted = rules.audience or "security.jwt.audience, which is not set"
        raise TokenError(f"the token is for another audience ('aud') than {wanted}")


def _filters(claims: Claims, name: str) -> list[str] | None:
    value = find_claim(claims, name)
    if value is None:
        return None
    filters = [value] if isinstance(value, str) else value
    if not isinstance(filters, list) or not all(isinstance(each, str) for each in filters):
        raise TokenError(f"the claim {name!r} must be a list of topic filters")
    if len(filters) > FILTERS_MAX:
        raise TokenError(f"the claim {name!r} has more than {FILTERS_MAX} topic filters")
    return filters
