"""Reads when certificates and revocation lists in PEM files end, without a library.

Python's `ssl` reads the dates of a peer's certificate only. The path to them in a certificate is
short (RFC 5280, section 4.1): Certificate, TBSCertificate, then after the optional version the
serial number, the algorithm and the issuer: Validity, with two times. The times of a revocation
list (section 5.1) are in its TBSCertList itself: thisUpdate, and nextUpdate if it has an end.
"""

import ssl
from base64 import b64decode
from collections.abc import Iterator
from datetime import UTC, datetime
from math import inf
from re import DOTALL, findall
from typing import Final

_PEM: Final = rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----"
_PEM_LIST: Final = rb"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----"
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_BEFORE_VALIDITY: Final = 3
"""The elements between the version and the validity: serial number, algorithm, issuer."""


def ends_of(pem: bytes) -> list[float]:
    """Returns the end of validity of each certificate in a file, in seconds since 1970.

    Raises `ValueError` for a file without a certificate that can be read.
    """
    found = findall(_PEM, pem, DOTALL)
    if not found:
        raise ValueError("no certificate in PEM format")
    return [_valid_until(ssl.PEM_cert_to_DER_cert(each.decode("ascii"))) for each in found]


def lists_valid_until(pem: bytes) -> float:
    """Returns the earliest end of validity of the revocation lists in a file, in seconds since
    1970, or infinity if none has an end.

    Raises `ValueError` for a file without a list that can be read.
    """
    found = findall(_PEM_LIST, pem, DOTALL)
    if not found:
        raise ValueError("no revocation list in PEM format")
    return min(_list_valid_until(b64decode(each)) for each in found)


def _list_valid_until(der: bytes) -> float:
    (_, signed), *_ = _elements(der)
    (_, body), *_ = _elements(signed)
    times = [each for each in _elements(body) if each[0] in (_UTC_TIME, _GENERALIZED_TIME)]
    return _seconds(*times[1]) if len(times) > 1 else inf


def _valid_until(der: bytes) -> float:
    (_, certificate), *_ = _elements(der)
    (_, body), *_ = _elements(certificate)
    fields = list(_elements(body))
    if fields and fields[0][0] == _VERSION:
        del fields[0]
    if len(fields) <= _BEFORE_VALIDITY:
        raise ValueError("a certificate without dates")
    tag, validity = fields[_BEFORE_VALIDITY]
    times = list(_elements(validity))
    if tag != _SEQUENCE or len(times) < 2:
        raise ValueError("a certificate without dates")
    return _seconds(*times[1])


def _seconds(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        # RFC 5280: two digits from 50 on are of the 20th century.
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"a time with the tag {tag}")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the tag and the content of each element of a DER sequence's content."""
    at = 0
    while at < len(data):
        if len(data) - at < 2:
            raise ValueError("a certificate that is cut off")
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(data[at : at + count], "big")
            at += count
        if length > len(data) - at:
            raise ValueError("a certificate that is cut off")
        yield tag, data[at : at + length]
        at += length
