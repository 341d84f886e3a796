"""`holdfast delayed`, see `holdfast.cli.resources.command`."""

from functools import partial
from typing import Final

from holdfast.cli.resources.command import add_parser_of, run

add_parser: Final = partial(add_parser_of, "delayed")

__all__ = ["add_parser", "run"]
