"""Makes imports of the project load the .py file even where a compiled module lies beside it."""

import sys
from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType


class _SourceFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(("holdfast.", "holdfast_")) or path is None:
            return None
        for entry in path:
            spec = FileFinder(entry, (SourceFileLoader, SOURCE_SUFFIXES)).find_spec(name, target)
            if spec is not None:
                return spec
        return None


def prefer_source() -> None:
    if _SourceFinder not in sys.meta_path:
        sys.meta_path.insert(0, _SourceFinder)
