"""The file with the cluster's secret."""

from pathlib import Path

import pytest

from holdfast.security.peer_secret import SecretError, read_secret


def write(directory: Path, text: bytes, mode: int = 0o600) -> Path:
    path = directory / "secret"
    path.write_bytes(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_white_space_around_it_does_not_count(tmp_path: Path, mode: int) -> None:
    assert read_secret(write(tmp_path, b" " + b"s" * 32 + b"\r\n", mode)) == b"s" * 32


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        (b"s" * 31 + b"\n", 0o600, "has 31 characters, it needs 32; make one with: (umask 077;"),
        (b"", 0o600, "has 0 characters"),
        (b"s" * 5000, 0o600, "has more than 4096 bytes"),
        (b"s" * 32, 0o644, "is open to others (mode 0644): chmod 600"),
        (b"s" * 32, 0o620, "is open to others (mode 0620)"),
        (b"s" * 32, 0o601, "is open to others (mode 0601)"),
    ],
)
def test_a_secret_that_protects_nothing(
    tmp_path: Path, text: bytes, mode: int, expected: str
) -> None:
    with pytest.raises(SecretError) as caught:
        read_secret(write(tmp_path, text, mode))
    assert expected in str(caught.value)
    assert str(tmp_path / "secret") in str(caught.value)
    assert "sss" not in str(caught.value)


def test_no_secret(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="there is no such file; make one with"):
        read_secret(tmp_path / "secret")
    with pytest.raises(SecretError, match="cannot read the shared secret: Is a directory"):
        read_secret(tmp_path)
