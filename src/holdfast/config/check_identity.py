"""Finds problems of the identity settings that their types do not show."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from holdfast.addresses import is_loopback
from holdfast.config.problem import Problem, shown
from holdfast.config.schema import Security


def identity_problems(security: Security) -> Iterator[Problem]:
    """Settings that are valid on their own but not together."""
    http = (("http.url", security.http.url), ("http.topic_url", security.http.topic_url))
    for key, url in (("jwt.jwks", security.jwt.jwks), *http):
        text = url_problem(url)
        if text:
            yield f"security.{key}", f" = {shown(_without_password(url))}: {text}"
    for key, url in http:
        if url and not url.startswith(("http:", "https:")):
            yield f"security.{key}", f" = {shown(_without_password(url))}: must begin with https://"
    if security.jwt.jwks and not security.jwt.algorithms:
        yield "security.jwt.algorithms", " = []: must allow at least one algorithm"


def has_sources(security: Security) -> bool:
    """Whether a source of identity is configured, besides files."""
    return bool(security.jwt.jwks or security.http.url)


def url_problem(url: str) -> str:
    """The reason why secrets or keys must not travel to this URL, or "". A path is no URL."""
    scheme, found, _ = url.partition("://")
    if scheme not in ("http", "https") and not url.startswith(("http:", "https:")):
        return "must begin with https://" if found and scheme.isalpha() else ""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        return f"not a URL: {error}"
    if not host:
        return "not a URL: it has no host"
    if parts.username is not None or parts.password is not None:
        return "a user and a password in a URL are not sent, and would be shown with the settings"
    if parts.scheme == "http" and not is_loopback(host):
        return "must begin with https:// (http:// only for this machine)"
    return ""


def _without_password(url: str) -> str:
    """The URL with asterisks in place of what is before its host."""
    before, found, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if not found or "@" not in authority:
        return url
    return f"{before}://***{rest[authority.rindex('@') :]}"
