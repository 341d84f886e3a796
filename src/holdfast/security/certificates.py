"""What a verified certificate says of whom it belongs to. Certificates are as `getpeercert` of the
standard library returns them: a dictionary, or something empty for none."""

from typing import Final, cast

_IDENTITIES: Final = ("DNS", "email", "URI")
"""Of the alternative names."""


def common_name(certificate: object) -> str:
    """Empty without one."""
    return next((value for key, value in _subject(certificate) if key == "commonName"), "")


def certificate_names(certificate: object) -> frozenset[str]:
    """Common names and DNS names."""
    names = {value for key, value in _subject(certificate) if key == "commonName"}
    return frozenset(names | {value for key, value in _alternatives(certificate) if key == "DNS"})


def certificate_identity(certificate: object) -> str:
    """The common name; without one the first DNS name, address of mail, or URI; else empty."""
    named = common_name(certificate)
    if named:
        return named
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
