"""Settings of the sources of identity: tokens, the HTTP check, hooks."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512",
    "EdDSA", "Ed25519", "HS256", "HS384", "HS512",
]  # fmt: skip
"""The algorithms of signatures that may be allowed. "none" is no signature."""


class Jwt(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """JSON Web Tokens as proof of identity."""

    jwks: str = ""
    """The JSON Web Key Set: a file, or a URL with https (http only on loopback); empty: no
    tokens."""
    token_in: Literal["password", "username"] = "password"
    """The field of CONNECT that has the token."""
    algorithms: list[Algorithm] = field(default_factory=lambda: ["RS256", "ES256", "EdDSA"])
    """The allowed algorithms. HS256 and its like need a secret in the key set."""
    issuer: str = ""
    """The required `iss`; empty: any."""
    audience: str = ""
    """The required `aud`. If it is empty, tokens with an `aud` are refused."""
    leeway_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """The seconds by which the clocks of issuer and broker may differ."""
    refresh_s: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """The seconds between two readings of the key set."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """The most seconds of one reading."""
    username_claim: Annotated[str, Meta(min_length=1)] = "sub"
    """The claim with the user name. A name with dots is also a path: realm.user."""
    publish_claim: str = "publish"
    """The claim with the topic filters that the client may publish to."""
    subscribe_claim: str = "subscribe"
    """The claim with the topic filters that it may receive. A token without both claims has the
    rights of `acl_file`."""


class HttpCheck(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An HTTP service that says who a client is and what it may do."""

    url: str = ""
    """The URL of the POST for each CONNECT, with https (http only on loopback); empty: none."""
    topic_url: str = ""
    """The URL of the POST for each filter of a SUBSCRIBE, and for the first PUBLISH to each topic,
    as `url`; empty: `acl_file` decides about topics."""
    topic_remember_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    """The seconds for which a decision about a topic counts."""
    authorization_file: str = ""
    """The file with the value of the header Authorization, in its first line."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 3.0
    """The seconds after which a client without a reply is refused with 0x88, and a message or
    filter with 0x97."""
    connections: Annotated[int, Meta(ge=1, le=1000)] = 16
    """The most connections to the service."""
    remember_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """The seconds for which an accepted login is accepted again without a request; 0: it is not
    remembered."""


class HookSettings(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Python code of the operator that the broker calls about its clients."""

    enabled: list[str] = field(default_factory=list)
    """The names of entry points of the group `holdfast.hooks`, in the order of their calls."""
    timeout_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    """The seconds after which a client is refused that waits for a hook."""
