"""`make vendor`: the libraries of the console, taken from npm as they are.

`vendor/VENDOR.toml` names each package with its version and licence, the SHA-256 of its archive,
and its files with the SHA-256 of what this tool writes. A file differs from the package's in two
ways only: imports by package name become relative, because browsers resolve no names without an
import map, and a script without exports gets one. `--check` compares and writes nothing; `--new`
takes over the hashes of changed versions.
"""

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parents[1] / "src/holdfast/api/console/site/vendor"
LIST = VENDOR / "VENDOR.toml"
LICENCES = "LICENCES.txt"
IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])([a-z@][a-z0-9@/-]*)\2""")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archive_of(package: dict[str, Any], directory: Path) -> bytes:
    """The archive of a package from npm's registry."""
    name = f"{package['name']}@{package['version']}"
    done = subprocess.run(
        ["npm", "pack", "--silent", name], cwd=directory, check=True, capture_output=True, text=True
    )
    return (directory / done.stdout.strip().splitlines()[-1]).read_bytes()


def adapted(text: str, names: dict[str, str], export: str) -> str:
    """The text of a module with relative imports, an export, and no reference to a source map."""

    def relative(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}./{names[match[3]]}{match[2]}"

    text = re.sub(r"\n?//# sourceMappingURL=\S+\s*$", "\n", IMPORT.sub(relative, text))
    return f"{text}export default {export};\n" if export else text


def written(packages: list[dict[str, Any]]) -> tuple[dict[str, bytes], list[str]]:
    """The files by name, and the packages whose archives have another hash than listed."""
    names = {file["imported_as"]: file["file"] for package in packages for file in package["files"]}
    found: dict[str, bytes] = {}
    licences: list[str] = []
    other: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        for package in packages:
            data = archive_of(package, Path(directory))
            if sha256(data) != package["sha256"]:
                other.append(f"{package['name']}: {sha256(data)}")
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for file in package["files"]:
                    member = archive.extractfile("package/" + file["source"])
                    assert member is not None
                    text = adapted(member.read().decode(), names, file.get("export", ""))
                    found[file["file"]] = text.encode()
                member = archive.extractfile("package/LICENSE")
                assert member is not None
                title = f"{package['name']} {package['version']} ({package['licence']})"
                licences.append(f"{title}\n\n{member.read().decode().strip()}\n")
    found[LICENCES] = f"\n{'=' * 80}\n\n".join(licences).encode()
    return found, other


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--new", action="store_true", help="take over the hashes")
    options = parser.parse_args(words)
    text = LIST.read_text()
    packages = tomllib.loads(text)["package"]
    found, other = written(packages)
    listed = {file["file"]: file for package in packages for file in package["files"]}
    if other and not options.new:
        print("archives with another hash:", *other, sep="\n  ")
        return 1
    for line in other:
        name, _, new = line.partition(": ")
        old = next(each["sha256"] for each in packages if each["name"] == name)
        text = text.replace(f'"{old}"', f'"{new}"') if old else text
    for name, data in found.items():
        path = VENDOR / name
        if options.check and (not path.exists() or path.read_bytes() != data):
            print(f"{name} is not what npm has")
            return 1
        if not options.check:
            path.write_bytes(data)
        if name in listed and listed[name]["sha256"] != sha256(data):
            if not options.new:
                print(f"{name}: its hash is {sha256(data)}")
                return 1
            text = text.replace(f'"{listed[name]["sha256"]}"', f'"{sha256(data)}"')
    if options.new:
        LIST.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
