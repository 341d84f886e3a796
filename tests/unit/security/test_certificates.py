"""Whose certificate it is, as the standard library tells it."""

from holdfast.security.certificates import certificate_identity, certificate_names, common_name

NAMED = {
    "subject": ((("organizationName", "O"),), (("commonName", "broker-a"),)),
    "subjectAltName": (("DNS", "a.example"), ("IP Address", "10.0.0.1"), ("DNS", "b.example")),
}


def test_names() -> None:
    assert common_name(NAMED) == "broker-a"
    assert certificate_names(NAMED) == {"broker-a", "a.example", "b.example"}
    assert certificate_identity(NAMED) == "broker-a"


def test_without_a_common_name_an_alternative_one_counts() -> None:
    def identity(*alternatives: tuple[str, str]) -> str:
        return certificate_identity({"subject": (), "subjectAltName": alternatives})

    assert identity(("URI", "spiffe://x"), ("email", "a@b"), ("DNS", "h"), ("DNS", "i")) == "h"
    assert identity(("URI", "spiffe://x"), ("email", "a@b")) == "a@b"
    assert identity(("URI", "spiffe://x")) == "spiffe://x"
    assert identity(("IP Address", "10.0.0.1")) == ""


def test_none_is_nobody() -> None:
    for nothing in (None, {}, ""):
        assert certificate_identity(nothing) == common_name(nothing) == ""
        assert certificate_names(nothing) == frozenset()
