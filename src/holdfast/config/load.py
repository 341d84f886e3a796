"""Reads the configuration: file, then environment, then command line, the later one winning.

- File: TOML, the sections of `schema`.
- Environment: `HOLDFAST_SECTION__KEY=value`; two underscores stand for the dot, list entries are
  numbered (`HOLDFAST_LISTENERS__0__PORT=1884`). Text is taken as it is, everything else is
  written as in TOML. A variable without a double underscore is not configuration.
- Command line: dotted keys with typed values (`{"listeners.0.port": 1884}`).

Relative paths in values count from the working directory.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import inspect

from holdfast.config.check import contradictions, find_type, problems
from holdfast.config.schema import Config

PREFIX: Final = "HOLDFAST_"


class ConfigError(Exception):
    """A configuration that cannot be used. `problems` has one line each; the text is the first
    one."""

    def __init__(self, *problems: str) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.problems = list(problems)


def load(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration with every default filled in. Raises `ConfigError`.

    `path` None: no file. `security.allow_anonymous` is resolved to true or false.
    """
    tree: dict[str, object] = {} if path is None else _read(path)
    origins: dict[str, str] = {}
    for name, text in sorted((environ or {}).items()):
        if name.startswith(PREFIX) and "__" in name:
            parts = name[len(PREFIX) :].lower().split("__")
            _put(tree, parts, _from_environment(parts, text), f"environment {name}", origins)
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted.split("."), value, "command line", origins)
    file = str(path) if path is not None else "configuration"

    def line(key: str, text: str) -> str:
        return f"{_origin(key, origins, file)}: {key}{text}"

    wrong = [line(key, text) for key, text in problems(tree)]
    if wrong:
        raise ConfigError(*wrong)
    config = msgspec.convert(tree, Config)
    wrong = [line(key, text) for key, text in contradictions(config)]
    if wrong:
        raise ConfigError(*wrong)
    return _resolve(config)


def check(path: Path, environ: Mapping[str, str] | None = None) -> list[str]:
    """The problems of a configuration file, one line each."""
    try:
        load(path, environ)
    except ConfigError as error:
        return error.problems
    return []


def _resolve(config: Config) -> Config:
    """Resolve an unset `allow_anonymous`. As in Mosquitto 2, clients of other machines need a
    setting that lets them in without credentials."""
    security = config.security
    if security.allow_anonymous is not None:
        return config
    anonymous = all(listener.is_loopback() for listener in config.listeners) and not (
        security.password_file or security.scram_file
    )
    return msgspec.structs.replace(
        config, security=msgspec.structs.replace(security, allow_anonymous=anonymous)
    )


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: byte {error.start} is wrong") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _from_environment(parts: list[str], text: str) -> object:
    kind = find_type(parts)
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.StrType | inspect.LiteralType):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # Left as text, so that the check of types reports it with the allowed values.
        return text


def _put(
    tree: dict[str, object], parts: list[str], value: object, origin: str, origins: dict[str, str]
) -> None:
    """Put one value into the tree, creating the tables on the way. If the file has another type in
    place of a table, that stays: the check of types reports it."""
    key = parts[0]
    node: object = tree.setdefault(parts[0], _empty(parts[1:])) if len(parts) > 1 else tree
    for position, part in enumerate(parts[1:], 1):
        last = position == len(parts) - 1
        if isinstance(node, list) and part.isdecimal():
            index = int(part)
            key += f"[{index}]"
            if index > len(node):
                raise ConfigError(
                    f"{origin}: {key} cannot be set: {parts[0]} has {len(node)} entries"
                )
            if index == len(node):
                node.append(value if last else _empty(parts[position + 1 :]))
            elif last:
                node[index] = value
            node = node[index]
        elif isinstance(node, dict):
            key += f".{part}"
            if last:
                node[part] = value
            else:
                node = node.setdefault(part, _empty(parts[position + 1 :]))
        else:
            return
    if len(parts) == 1:
        tree[key] = value
    origins[key] = origin


def _empty(rest: list[str]) -> object:
    return [] if rest and rest[0].isdecimal() else {}


def _origin(key: str, origins: dict[str, str], file: str) -> str:
    """The source of a key: its own, that of a key in it, or that of the nearest table around it."""
    for known, origin in origins.items():
        if known.startswith((f"{key}.", f"{key}[")):
            return origin
    while key:
        if key in origins:
            return origins[key]
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return file
