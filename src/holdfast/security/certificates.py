"""Reads the names in a verified certificate. Certificates are as `getpeercert` of the standard
library returns them: a dictionary, or an empty value for none.
"""

from typing import Final, cast

_IDENTITIES: Final = ("DNS", "email", "URI")
"""The kinds of alternative names that identify a client, in order of preference."""


def common_name(certificate: object) -> str:
    """The common name, or ""."""
    return next((value for key, value in _subject(certificate) if key == "commonName"), "")


def certificate_names(certificate: object) -> frozenset[str]:
    """The common names and DNS names."""
    names = {value for key, value in _subject(certificate) if key == "commonName"}
    return frozenset(names | {value for key, value in _alternatives(certificate) if key == "DNS"})


def certificate_identity(certificate: object) -> str:
    """The common name, otherwise the first DNS name, mail address or URI, otherwise ""."""
    return common_name(certificate) or _alternative_name(certificate)


def user_of(certificate: object, source: str) -> str:
    """The user name that a client certificate proves, or "". `source`: "cn" for the common name,
    "san" for the first DNS name, mail address or URI, "none"."""
    if source == "cn":
        return common_name(certificate)
    return _alternative_name(certificate) if source == "san" else ""


def _alternative_name(certificate: object) -> str:
    alternatives = _alternatives(certificate)
    return next(
        (value for kind in _IDENTITIES for key, value in alternatives if key == kind and value), ""
    )


def _subject(certificate: object) -> list[tuple[str, str]]:
    if not isinstance(certificate, dict):
        return []
    groups = cast("tuple[tuple[tuple[str, str], ...], ...]", certificate.get("subject", ()))
    return [pair for group in groups for pair in group]


def _alternatives(certificate: object) -> list[tuple[str, str]]:
    if not isinstance(certificate, dict):
        return []
    return list(cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ())))
