#!/usr/bin/env python3
"""Releases of Holdfast.

    tools/release.py prepare 0.2.0   write the version, date the changelog, record the formats
    tools/release.py check           what keeps this commit from being a release; exit code 1 if any
    tools/release.py tag             check, then make the tag v0.2.0

`make release` checks, builds every package, tests it on bare roots, and makes the tag. Nothing is
uploaded: `git push origin v0.2.0` and the files in dist/ are the release.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+")
HEADING = re.compile(r"^## (\S+) \((.+)\)$", re.MULTILINE)
"""A section of the changelog: a version, and its date or `unreleased`."""
UNRELEASED = "unreleased"
NAMED = re.compile(
    r'((?:holdfast|holdfast-spark)[-_:]|newTag: "|appVersion: "|^version: )(\d+\.\d+\.\d+)',
    re.MULTILINE,
)
"""A package, an image or a chart with its version."""


class ReleaseError(Exception):
    """A tree that cannot be prepared. The text says what to do."""


class Release:
    """The files of one tree that name its version."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "pyproject.toml"
        self.package = root / "src" / "holdfast" / "__init__.py"
        self.changelog = root / "CHANGELOG.md"

    def users(self) -> list[Path]:
        """The files that name packages and images with their version."""
        deployments = sorted((self.root / "deploy").rglob("*.y*ml"))
        return [*deployments, *self.root.glob("docs/install.md")]

    @property
    def version(self) -> str:
        return str(tomllib.loads(self.project.read_text())["project"]["version"])

    def section(self) -> tuple[str, str, str]:
        """Version, date and text of the newest section of the changelog."""
        _, version, date, text = HEADING.split(self.changelog.read_text(), maxsplit=1)
        return version, date, HEADING.split(text, maxsplit=1)[0].strip()

    def problems(self) -> Iterator[str]:
        """What keeps the tree from being a release, one line each."""
        version = self.version
        if f'__version__ = "{version}"' not in self.package.read_text():
            yield f"{self.package.name}: __version__ is not {version}, as in pyproject.toml"
        heading, date, text = self.section()
        if heading != version:
            yield f"CHANGELOG.md: the newest section is {heading}, the version is {version}"
        elif re.fullmatch(r"\d{4}-\d\d-\d\d", date) is None:
            yield f"CHANGELOG.md: {version} is ({date}), not a date: tools/release.py prepare"
        if not text.startswith("- "):
            yield f"CHANGELOG.md: nothing stands under {heading}"
        for path in self.users():
            if {found for _, found in NAMED.findall(path.read_text())} - {version}:
                yield f"{path.relative_to(self.root)}: names another version than {version}"
        if not self.has_formats(version):
            yield f"tests/data/formats/{version}: no directories: tools/formats.py --release"
        if self.git("status", "--porcelain"):
            yield "git: there are changes that are not committed"
        if self.git("tag", "--list", f"v{version}"):
            yield f"git: the tag v{version} exists: choose the next version"

    def has_formats(self, version: str) -> bool:
        """Whether data directories of the version are kept."""
        return any((self.root / "tests/data/formats" / version).glob("*.tar.gz"))

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def prepare(self, version: str) -> None:
        """Write the version and today's date. The newest section of the changelog gets them.

        Raises ReleaseError if that section is a release already.
        """
        heading, date, _ = self.section()
        if date != UNRELEASED:
            raise ReleaseError(
                f"CHANGELOG.md: the newest section, {heading} ({date}), is a release: begin"
                f" one for this version, ## {version} ({UNRELEASED})"
            )
        text = self.project.read_text()
        self.project.write_text(re.sub(r'^version = ".*"$', f'version = "{version}"', text, count=1,
                                       flags=re.MULTILINE))  # fmt: skip
        text = self.package.read_text()
        self.package.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', text))
        for path in self.users():
            path.write_text(NAMED.sub(rf"\g<1>{version}", path.read_text()))
        today = datetime.date.today().isoformat()
        text = self.changelog.read_text()
        self.changelog.write_text(HEADING.sub(f"## {version} ({today})", text, count=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("version", metavar="X.Y.Z")
    commands.add_parser("check")
    commands.add_parser("tag")
    arguments = parser.parse_args()
    release = Release(ROOT)
    if arguments.command == "prepare":
        if VERSION.fullmatch(arguments.version) is None:
            parser.error(f"{arguments.version!r} is no version like 1.2.3")
        try:
            release.prepare(arguments.version)
        except ReleaseError as error:
            print(f"release: {error}", file=sys.stderr)
            return 1
        if release.has_formats(arguments.version):
            return 0  # they were recorded before
        formats = [sys.executable, str(ROOT / "tools" / "formats.py"), "--release"]
        return subprocess.run(formats, check=False).returncode
    problems = list(release.problems())
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if not problems and arguments.command == "tag":
        release.git("tag", "-a", f"v{release.version}", "-m", f"Holdfast {release.version}")
        print(f"tagged v{release.version}; push it: git push origin v{release.version}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
