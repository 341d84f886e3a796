"""Makes `import holdfast.pipeline` and what is below it load `holdfast_lake`, its present name."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

OLD: Final = "holdfast.pipeline"
NEW: Final = "holdfast_lake"


class _Loaded:
    """Gives the module under its new name. The import system would give it the old one's spec.

    It is no `importlib.abc.Loader`, whose import takes 20 ms of CPU.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._module = import_module(self._name)
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != OLD and not name.startswith(OLD + "."):
            return None
        return ModuleSpec(name, _Loaded(NEW + name.removeprefix(OLD)))  # type: ignore[arg-type]


def accept_old_names() -> None:
    """Comes before the finders of files, which find `holdfast.pipeline.x` by the path of its
    package: as a second module with other classes."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
