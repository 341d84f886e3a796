"""The documentation site: `make docs`.

The pages of docs/ and what they link to in the repository are gathered in build/site-source, with
reference pages made from the settings, the commands, the admin API and the reason codes. MkDocs
makes build/site of them, and fails for a link that leads nowhere. The site needs no network.

    python tools/docs_site.py             build/site
    python tools/docs_site.py --serve     at http://127.0.0.1:8000
    python tools/docs_site.py --check     builds it in --site-dir, and fetches nothing
"""

import argparse
import contextlib
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
GATHERED: Final = ROOT / "build" / "site-source"
LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
TABLE_ROW: Final = re.compile(r"^(\|[^|\n]*\|)(.*)$", re.MULTILINE)
"""A row of a table: its first column, and the others."""
NAME: Final = re.compile(r"(?<![`\[])`([\w./=]{16,})`(?![`\]])")
FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
DIAGRAM: Final = re.compile(r"^```mermaid$.*?^```$", re.MULTILINE | re.DOTALL)
NOT_SEARCHED: Final = "---\nsearch: {exclude: true}\n---\n\n"
"""The beginning of a page that the search leaves out."""
LANGUAGES: Final = {
    ".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "sh", ".json": "json",
    ".service": "ini", ".conf": "ini",
}  # fmt: skip
HELP_COLUMNS: Final = "90"
SCRIPTS: Final = {
    "mermaid.min.js": ("mermaid@11", "dist/mermaid.min.js"),
    # A browser starts no worker from a file. The search needs one.
    "iframe-worker.js": ("iframe-worker@1", "shim/index.js"),
}
"""By file: the package of npm, and the script in it."""


class Site:
    """The gathered pages. A file of the repository outside docs/ becomes a page when a page links
    to it."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._waiting: list[Path] = []
        self._known: set[Path] = set()

    def gather(self) -> None:
        """Write all pages below the target folder."""
        shutil.rmtree(self.target, ignore_errors=True)
        for path in sorted(DOCS.rglob("*")):
            if path.suffix == ".md":
                self.write(path.relative_to(DOCS), path.read_text(), path.parent)
            elif path.is_file():
                copy = self.target / path.relative_to(DOCS)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        for name, made in REFERENCE.items():
            self.write(Path("reference") / name, made(), DOCS / "reference")
        while self._waiting:
            path = self._waiting.pop()
            text = listing(path)
            if path.suffix != ".md":
                # The search would show the code of programs before the pages about them.
                text = f"{NOT_SEARCHED}{text}"
            self.write(page_of(path), text, path if path.is_dir() else path.parent)

    def write(self, page: Path, text: str, base: Path) -> None:
        """Write one page; `base` is the folder to which the links of `text` are relative."""
        path = self.target / page
        path.parent.mkdir(parents=True, exist_ok=True)
        linked = outside_fences(text, lambda prose: self._linked(prose, page, base))
        path.write_text(scrollable_diagrams(outside_fences(linked, breakable_names)))

    def _linked(self, prose: str, page: Path, base: Path) -> str:
        def link(found: re.Match[str]) -> str:
            text, address = found[1], found[2]
            name, mark, anchor = address.partition("#")
            if not name or "://" in name or name.startswith("mailto:"):
                return found[0]
            path = Path(os.path.normpath(base / name))
            if path.is_relative_to(DOCS):
                place = path.relative_to(DOCS)
                place = place / "README.md" if path.is_dir() else place
            elif path.exists() and path.is_relative_to(ROOT):
                if path not in self._known:
                    self._known.add(path)
                    self._waiting.append(path)
                place = page_of(path)
            else:
                return found[0]
            to = os.path.relpath(place, page.parent)
            # A reader of the site sees no files.
            shown = title(path) if text == path.name and path.suffix == ".md" else text
            return f"[{shown}]({to}{mark}{anchor})"

        return LINK.sub(link, prose)


def title(path: Path) -> str:
    """The first heading of a page."""
    return path.read_text().partition("\n")[0].removeprefix("# ")


def scrollable_diagrams(text: str) -> str:
    """The text with each diagram in a box, which scrolls on a narrow screen."""
    return DIAGRAM.sub(r'<div class="diagram" markdown>\n\n\g<0>\n\n</div>', text)


def breakable_names(prose: str) -> str:
    """The text, where a long name in a table may go on in the next line behind a dot or underscore.
    The names in the first column stay in one piece."""

    def name(found: re.Match[str]) -> str:
        parts = re.split(r"(?<=[._/=])(?=\w)", html.escape(found[1], quote=False))
        return f"<code>{'<wbr>'.join(parts)}</code>"

    def row(found: re.Match[str]) -> str:
        return found[1] + NAME.sub(name, found[2])

    return TABLE_ROW.sub(row, prose)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with everything changed that is no block of code."""
    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def page_of(path: Path) -> Path:
    """The page of a file or folder of the repository."""
    place = path.relative_to(ROOT)
    return Path("repository") / (
        place if path.suffix == ".md" else place.with_name(f"{place.name}.md")
    )


def listing(path: Path) -> str:
    """The page's text: Markdown as it is, another file as a block of code, a folder's files."""
    if path.suffix == ".md":
        return path.read_text()
    if path.is_file():
        return f"# {path.relative_to(ROOT)}\n\n{block(path)}"
    files = subprocess.run(
        ["git", "ls-files", "--", "."], cwd=path, capture_output=True, text=True, check=True
    ).stdout.split()
    parts = [f"# {path.relative_to(ROOT)}/\n"]
    parts += [f"## {name}\n\n{block(path / name)}" for name in sorted(files)]
    return "\n".join(parts)


def block(path: Path) -> str:
    """A file as a block of code."""
    fence = "~~~~~~"
    return f"{fence} {LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n{fence}\n"


def cell(text: str) -> str:
    """A text in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def settings_page() -> str:
    """Every key of the configuration, from the schema."""
    import msgspec
    from msgspec import inspect

    from holdfast.config.explain import explain
    from holdfast.config.schema import Config
    from holdfast.config.values import all_keys

    kind = inspect.type_info(Config)
    sections: dict[str, list[str]] = {}
    for key in all_keys(kind):
        found = explain(key, None, {}, {})
        table, _, name = key.rpartition(".")
        default = "" if found.default is None else msgspec.json.encode(found.default).decode()
        if len(default) > 60:
            continue
        row = f"| `{name}` | {cell(found.text)} | {cell(found.allowed)} | `{cell(default)}` |"
        sections.setdefault(table, []).append(row)
    head = "| key | meaning | allowed | default |"
    parts = [
        "# Configuration\n",
        "Every key of the configuration file. `holdfast config explain KEY` prints the same for one"
        " key, with its present value and where that is set."
        " [Operating a broker](../operating.md) describes the forms of a setting:"
        " file, environment variable, option.\n",
    ]
    for table, rows in sections.items():
        title = f"`[{table}]`" if table else "Without a table"
        title = title.replace("[listeners]", "[[listeners]]")
        parts += [f"## {title}\n", head, "|---|---|---|---|"]
        parts += [*rows, ""]
    return "\n".join(parts)


def help_of(words: list[str]) -> str:
    """What `holdfast WORDS --help` prints."""
    from holdfast.cli.main import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return text.getvalue()


def commands_of(words: list[str], parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """The command and all below it, as the words that call them."""
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            seen: set[int] = set()
            for name, each in action.choices.items():
                if id(each) not in seen:
                    seen.add(id(each))
                    yield from commands_of([*words, name], each)


def commands_page() -> str:
    """Every command with its options, from the parsers."""
    from holdfast.cli.main import COMMANDS, OWN_OPTIONS, build_parser

    os.environ["COLUMNS"] = HELP_COLUMNS
    parts = ["# Commands\n", "What `holdfast COMMAND --help` prints, for every command.\n"]
    for command, text in COMMANDS.items():
        parts += [f"## holdfast {command}\n", f"{text[0].upper()}{text[1:]}.\n"]
        found = [[command]]
        if command not in OWN_OPTIONS:
            (action,) = (
                each
                for each in build_parser([command])._actions
                if isinstance(each, argparse._SubParsersAction)
            )
            found = list(commands_of([command], action.choices[command]))
        for words in found:
            if len(words) > 1:
                parts.append(f"### holdfast {' '.join(words)}\n")
            parts.append(f"~~~~~~ text\n{help_of(words).rstrip()}\n~~~~~~\n")
    return "\n".join(parts)


def api_page() -> str:
    """Every route of the admin port, from the OpenAPI document of a running broker."""
    from urllib.request import urlopen

    from holdfast.testing import Broker

    with Broker(admin=True) as broker:
        address = f"http://127.0.0.1:{broker.admin_port}/api/v1/openapi.json"
        document = json.loads(urlopen(address).read())
    parts = [
        "# Routes of the admin port\n",
        "The routes of the OpenAPI document at `/api/v1/openapi.json`."
        " [The admin API](../admin-api.md) describes users, scopes and paging.\n",
    ]
    by_subject: dict[str, list[str]] = {}
    for path, operations in sorted(document["paths"].items()):
        subject = path.removeprefix("/api/v1/").strip("/").split("/")[0] or "/"
        for method, operation in operations.items():
            by_subject.setdefault(subject, []).append(route(path, method, operation))
    for subject, routes in by_subject.items():
        parts += [f"## {subject}\n", *routes]
    return "\n".join(parts)


def route(path: str, method: str, operation: Any) -> str:
    """The text about one route."""
    summary = operation["summary"]
    scope = operation["x-scope"]
    text = (
        f"### `{method.upper()} {path}`\n\n{summary[0].upper()}{summary[1:]}. Scope: `{scope}`.\n"
    )
    rows = [
        f"| `{each['name']}` | {cell(each['description'])} | {kind_of(each['schema'])} |"
        f" {'required' if each['required'] else default_of(each['schema'])} |"
        for each in operation["parameters"]
    ]
    if rows:
        text += "\n| parameter | meaning | type | default |\n|---|---|---|---|\n"
        text += "\n".join(rows) + "\n"
    return text


def kind_of(schema: Any) -> str:
    """The type of a parameter in a word."""
    if "enum" in schema:
        return " ".join(f"`{each}`" for each in schema["enum"])
    return str(schema.get("type", "")).replace("|", "\\|")


def default_of(schema: Any) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def reasons_page() -> str:
    """The reason codes, with the packets that carry them."""
    from holdfast.protocol.mqtt import packets, reasons

    types = {getattr(packets, name): name for name in (
        "CONNACK", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBACK", "UNSUBACK", "DISCONNECT",
        "AUTH")}  # fmt: skip
    rows = []
    codes = sorted({code for allowed in reasons.ALLOWED.values() for code in allowed})
    for code in codes:
        carriers = [types[kind] for kind, allowed in reasons.ALLOWED.items() if code in allowed]
        version_3 = reasons.connack_return_code(code) if "CONNACK" in carriers else ""
        name = reasons.NAMES.get(code, "Success")
        rows.append(f"| `{code:#04x}` | {name} | {', '.join(carriers)} | {version_3} |")
    return (
        textwrap.dedent("""\
        # Reason codes

        The MQTT 5 reason codes with the packets that may carry them, and the CONNACK return code
        that an MQTT 3 client receives instead. [Limits](../limits.md) has the code of each limit.

        | code | name | packets | MQTT 3 CONNACK |
        |---|---|---|---|
        """)
        + "\n".join(rows)
        + "\n"
    )


REFERENCE: Final[dict[str, Callable[[], str]]] = {
    "configuration.md": settings_page,
    "commands.md": commands_page,
    "api.md": api_page,
    "reasons.md": reasons_page,
}
"""The generated pages, below reference/."""


ROW: Final = re.compile(r"^\| \[[^\]]+\]\(([^)]+\.md)\) \| ([a-z]+)", re.MULTILINE)
SECTIONS: Final = {
    "guide": "Guides", "reference": "Reference", "concept": "Concepts", "internals": "Internals",
}  # fmt: skip
FIRST: Final = ("README.md", "start.md", "from-mosquitto.md", "from-emqx.md")
"""The pages of the section Start."""


def navigation(target: Path) -> list[dict[str, list[str]]]:
    """The sections of the site, by the first kind that docs/README.md gives each page."""
    sections: dict[str, list[str]] = {"Start": list(FIRST)}
    sections.update({title: [] for title in SECTIONS.values()})
    sections["Reference"] = [f"reference/{name}" for name in REFERENCE]
    for page, kind in ROW.findall((DOCS / "README.md").read_text()):
        if page not in FIRST and (target / page).exists():
            sections[SECTIONS[kind]].append(page)
    return [{title: pages} for title, pages in sections.items()]


def add_scripts(target: Path, *, fetches: bool) -> None:
    """Put the scripts beside the pages, from the package registry of npm, so that the site needs no
    network. Without npm, diagrams are text, and there is no search in files that no server
    serves."""
    (target / "assets").mkdir(parents=True, exist_ok=True)
    for name, (package, member) in SCRIPTS.items():
        kept = ROOT / "build" / name
        if fetches and not kept.exists() and shutil.which("npm"):
            fetch_script(package, member, kept)
        script = target / "assets" / name
        if kept.exists():
            shutil.copyfile(kept, script)
        else:
            script.write_text("// Not here: npm was missing when the site was made.\n")


def fetch_script(package: str, member: str, kept: Path) -> None:
    folder = kept.parent
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode == 0:
        archive = folder / done.stdout.split()[-1]
        with tarfile.open(archive) as packed:
            script = packed.extractfile(f"package/{member}")
            assert script is not None
            kept.write_bytes(script.read())
        archive.unlink()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--serve", action="store_true", help="serve the pages on loopback")
    parser.add_argument("--check", action="store_true", help="build elsewhere, fetch nothing")
    parser.add_argument("--site-dir", help="where --check builds (a temporary folder)")
    args = parser.parse_args(arguments)
    Site(GATHERED).gather()
    add_scripts(GATHERED, fetches=not args.check)
    # JSON is YAML too.
    config = ROOT / "build" / "mkdocs.yml"
    made = {"INHERIT": "../mkdocs.yml", "docs_dir": str(GATHERED), "nav": navigation(GATHERED)}
    config.write_text(json.dumps(made))
    with tempfile.TemporaryDirectory() as folder:
        words = ["serve"] if args.serve else ["build", "--strict", "--quiet"]
        if args.check:
            words += ["--site-dir", args.site_dir or folder]
        return subprocess.run(
            [sys.executable, "-m", "mkdocs", *words, "--config-file", str(config)],
            cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
