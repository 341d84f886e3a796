"""`holdfast completion`: the scripts that complete its commands and options in bash, zsh and fish.

They are made from the parsers, so that they have each option. A script contains all words, and so
the Tab key starts no Python.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

FILES: Final = ("FILE", "PATH")
FOLDERS: Final = ("DIR", "DIRECTORY")
"""The metavariables of values that are completed as files or as directories."""
TEXT_CHARACTERS_MAX: Final = 60

_EPILOG: Final = """\
bash:  source <(holdfast completion bash)
       or, for all shells: holdfast completion bash >/etc/bash_completion.d/holdfast
zsh:   holdfast completion zsh >"${fpath[1]}/_holdfast"
fish:  holdfast completion fish >~/.config/fish/completions/holdfast.fish"""


@dataclass
class Value:
    """The value of an option or argument: one of `choices`, or of the kind "file", "dir" or ""."""

    kind: str = ""
    choices: tuple[str, ...] = ()


@dataclass
class CommandWords:
    """The words after one command, such as `cluster status`."""

    words: dict[str, str] = field(default_factory=dict)
    """The help of each subcommand."""
    options: dict[str, str] = field(default_factory=dict)
    """The help of each option."""
    values: dict[str, Value] = field(default_factory=dict)
    """The value of each option that has one."""
    argument: Value = field(default_factory=Value)
    """The first argument that can be completed."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print the completion of bash, zsh or fish",
        description="Print a script that completes the commands and options of holdfast.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for line in SHELLS[args.shell](all_words()):
        print(line)
    return 0


def all_words() -> dict[str, CommandWords]:
    """The words by command; "" has the commands themselves."""
    from holdfast.cli.main import COMMANDS, OWN_OPTIONS, build_parser
    from holdfast.cli.pubsub import pub, sub

    found: dict[str, CommandWords] = {}
    _collect(build_parser([name for name in COMMANDS if name not in OWN_OPTIONS]), "", found)
    for name, parser in (("pub", pub.new_parser()), ("sub", sub.new_parser())):
        _collect(parser, name, found)
    found[""].words = dict(COMMANDS)
    return found


def _collect(parser: argparse.ArgumentParser, path: str, found: dict[str, CommandWords]) -> None:
    entry = found[path] = CommandWords()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, child in action.choices.items():
                entry.words[name] = helps.get(name, "")
                _collect(child, f"{path} {name}".strip(), found)
        elif action.option_strings:
            for option in action.option_strings:
                entry.options[option] = action.help or ""
                if action.nargs != 0:
                    entry.values[option] = _value_of_action(action)
        elif entry.argument == Value():
            entry.argument = _value_of_action(action)


def _value_of_action(action: argparse.Action) -> Value:
    if action.choices is not None:
        return Value(choices=tuple(str(each) for each in action.choices))
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return _value_of(action.type, metavar)


def _value_of(kind: object, metavar: str) -> Value:
    """The value with a metavariable, such as FILE."""
    name = metavar.upper()
    if name.endswith(FOLDERS) or name == "CAPATH":
        return Value("dir")
    if kind is Path or name.endswith(FILES) or name in ("CAFILE", "CERT", "KEY"):
        return Value("file")
    return Value()


def _sentence(text: str) -> str:
    """The help in one line."""
    line = " ".join(text.replace("%%", "%").split())
    return line if len(line) <= TEXT_CHARACTERS_MAX else line[: TEXT_CHARACTERS_MAX - 1] + "…"


def _paths(found: Mapping[str, CommandWords]) -> str:
    """The commands, as alternatives of a shell's `case`."""
    return "|".join(shlex.quote(path) for path in found if path)


def bash_lines(found: Mapping[str, CommandWords]) -> Iterator[str]:
    """The script for bash 4 and newer."""
    yield "# bash completion of holdfast. Made by: holdfast completion bash"
    yield "_holdfast() {"
    yield '  local at=1 path="" words="" word=${COMP_WORDS[COMP_CWORD]}'
    yield "  local before=${COMP_WORDS[COMP_CWORD-1]}"
    yield "  COMPREPLY=()"
    yield from _walk(found, '"${COMP_WORDS[at]}"', "COMP_CWORD")
    yield '  case "$path:$before" in'
    for path, entry in found.items():
        for option, value in entry.values.items():
            yield f"    {shlex.quote(f'{path}:{option}')}) {_bash_value(value)}; return ;;"
    yield "  esac"
    yield '  case "$path" in'
    for path, entry in found.items():
        words = " ".join([*entry.words, *entry.argument.choices])
        options = " ".join(entry.options)
        kind = f"; {_bash_value(entry.argument)}" if entry.argument.kind else ""
        yield f"    {shlex.quote(path)})"
        yield f"      if [[ $word == -* ]]; then words={shlex.quote(options)}"
        yield f"      else words={shlex.quote(words)}{kind}; fi ;;"
    yield "  esac"
    yield '  COMPREPLY+=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -F _holdfast holdfast"


def _bash_value(value: Value) -> str:
    if value.choices:
        choices = shlex.quote(" ".join(value.choices))
        return f'COMPREPLY=($(compgen -W {choices} -- "$word"))'
    if value.kind:
        # Names of files are left to readline, which quotes blanks in them.
        return f"compopt -o {'dirnames' if value.kind == 'dir' else 'default'}"
    return ":"


def _walk(found: Mapping[str, CommandWords], word: str, end: str) -> Iterator[str]:
    """The loop of bash and zsh that finds the command before the cursor."""
    yield f"  while (( at < {end} )); do"
    yield f'    case "${{path:+$path }}"{word} in'
    yield f'      {_paths(found)}) path="${{path:+$path }}"{word} ;;'
    yield "    esac"
    yield "    (( at += 1 ))"
    yield "  done"


def zsh_lines(found: Mapping[str, CommandWords]) -> Iterator[str]:
    """The script for zsh."""
    yield "#compdef holdfast"
    yield "# zsh completion of holdfast. Made by: holdfast completion zsh"
    yield "_holdfast() {"
    yield '  local at=2 path_=""'
    yield "  local -a words_ options_"
    yield from (line.replace("path", "path_") for line in _walk(found, '"${words[at]}"', "CURRENT"))
    yield '  case "$path_:${words[CURRENT-1]}" in'
    for path, entry in found.items():
        for option, value in entry.values.items():
            yield f"    {shlex.quote(f'{path}:{option}')}) {_zsh_value(value)}; return ;;"
    yield "  esac"
    yield '  case "$path_" in'
    for path, entry in found.items():
        yield f"    {shlex.quote(path)})"
        yield f"      words_=({_described(entry.words)})"
        yield f"      options_=({_described(entry.options)})"
        if entry.argument != Value():
            yield f"      {_zsh_value(entry.argument)}"
        yield "      ;;"
    yield "  esac"
    yield "  if [[ $PREFIX == -* ]]; then _describe -o option options_"
    yield "  else _describe command words_; fi"
    yield "}"
    yield 'if [[ $funcstack[1] == _holdfast ]]; then _holdfast "$@"'
    yield "else compdef _holdfast holdfast; fi"


def _described(words: Mapping[str, str]) -> str:
    return " ".join(
        shlex.quote(f"{word}:{_sentence(text)}" if text else word) for word, text in words.items()
    )


def _zsh_value(value: Value) -> str:
    if value.choices:
        return f"compadd -- {shlex.join(value.choices)}"
    return {"file": "_files", "dir": "_files -/"}.get(value.kind, ":")


def fish_lines(found: Mapping[str, CommandWords]) -> Iterator[str]:
    """The script for fish 3 and newer."""
    yield "# fish completion of holdfast. Made by: holdfast completion fish"
    yield "function __holdfast_path"
    yield "  set -l path"
    yield "  for word in (commandline -opc)[2..]"
    yield "    set -l longer (string join ' ' -- $path $word)"
    yield f"    contains -- $longer {' '.join(shlex.quote(each) for each in found if each)}"
    yield "    and set path $longer"
    yield "  end"
    yield "  string join ' ' -- $path"
    yield "end"
    yield "function __holdfast_at"
    yield "  set -l path (__holdfast_path)"
    yield '  test "$path" = "$argv[1]"'
    yield "end"
    yield "complete -c holdfast -f"
    for path, entry in found.items():
        start = f"complete -c holdfast -n {shlex.quote(f'__holdfast_at {shlex.quote(path)}')}"
        for word, text in entry.words.items():
            yield f"{start} -a {word} -d {shlex.quote(_sentence(text))}"
        for option, text in entry.options.items():
            flag = "-l" if option.startswith("--") else "-s" if len(option) == 2 else "-o"
            value = entry.values.get(option)
            yield (
                f"{start} {flag} {option.lstrip('-')} -d {shlex.quote(_sentence(text))}"
                f"{'' if value is None else _fish_value(value)}"
            )
        if entry.argument != Value():
            yield f"{start}{_fish_value(entry.argument).removeprefix(' -x').removeprefix(' -r')}"


def _fish_value(value: Value) -> str:
    if value.choices:
        return f" -x -a {shlex.quote(' '.join(value.choices))}"
    if value.kind == "dir":
        return " -x -a '(__fish_complete_directories)'"
    return " -r -F" if value.kind == "file" else " -x"


SHELLS: Final = {"bash": bash_lines, "zsh": zsh_lines, "fish": fish_lines}
