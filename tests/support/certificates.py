"""Certificates in PEM files, of an authority of the test's own."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificate:
    certificate: str
    key: str


class Authority:
    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._authority = trustme.CA()
        self._directory = directory
        self._name = name
        self.ca = str(directory / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, common_name: str = "", host: str = "127.0.0.1") -> Certificate:
        issued = self._authority.issue_cert(host, common_name=common_name or None)
        stem = self._directory / f"{self._name}-{common_name or host}"
        made = Certificate(f"{stem}.pem", f"{stem}.key")
        issued.cert_chain_pems[0].write_to_path(made.certificate)
        issued.private_key_pem.write_to_path(made.key)
        return made
