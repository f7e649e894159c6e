"""Notice that a module has just been imported, without importing it and without being seen.

The finder answers for the watched names only. It takes the spec that the other finders give and puts a
stand-in before its loader for the duration of one execution; afterwards the module's ``__spec__``,
``__loader__`` and ``__file__`` are what they would be without us, so ``inspect.getsource``,
``importlib.reload`` and pickling see nothing new.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

AfterImport = Callable[[str, ModuleType], None]


class PostImportFinder(MetaPathFinder):
    """Calls back after each execution of a watched module, reloads included.

    Args:
        names: full dotted names to watch.
        after_import: receives the name and the executed module; it must not raise.
    """

    def __init__(self, names: Iterable[str], after_import: AfterImport) -> None:
        self._names = frozenset(names)
        self._after_import = after_import

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the remaining finders give, with our stand-in as its loader."""
        if fullname not in self._names:
            return None
        spec = self._spec_of_others(fullname, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast(Loader, _StandInLoader(spec.loader, self._after_import))
        return spec

    def _spec_of_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the finders behind this one: those before it have already been asked, and had no answer.

        Each finder asks only downwards, so nothing recurses. A tool whose finder asks all of sys.meta_path
        again gets our stand-in, and two stand-ins in a row call back twice, which is harmless.
        """
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in behind:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None


class _StandInLoader:
    """Behaves like the real loader in all but one thing: it calls back after ``exec_module``."""

    def __init__(self, loader: Any, after_import: AfterImport) -> None:
        self._loader = loader
        self._after_import = after_import

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy made without __init__ would otherwise ask itself forever
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Step aside, let the real loader execute the module, then call back."""
        name = module.__name__
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # A module may put another object in its place while it runs; importers get that one.
        self._after_import(name, sys.modules.get(name, module))
