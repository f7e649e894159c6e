"""Calls a function after a module is imported, without importing it and without a visible trace.

The finder handles only the watched names. It takes the spec of the other finders and wraps its loader for one
execution; afterwards the module's ``__spec__``, ``__loader__`` and ``__file__`` are as if this finder did not exist, so
``inspect.getsource``, ``importlib.reload`` and pickling are not affected.
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
    """Calls a function after each execution of a watched module, reloads included.

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
        """Return the spec of the remaining finders, with a wrapper of its loader; None for other names."""
        if fullname not in self._names:
            return None
        spec = self._spec_of_others(fullname, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = cast(Loader, _StandInLoader(spec.loader, self._after_import))
        return spec

    def _spec_of_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return the spec of the finders behind this one; the finders before it did not find the module.

        Each finder searches only behind itself, so nothing recurses. A tool whose finder searches all of sys.meta_path
        gets our wrapper, and two wrappers in a row call back twice, which is harmless.
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
    """A loader that behaves like the real one, but calls back after ``exec_module``."""

    def __init__(self, loader: Any, after_import: AfterImport) -> None:
        self._loader = loader
        self._after_import = after_import

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy made without __init__ would otherwise recurse forever
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the real loader, let it execute the module, then call back."""
        name = module.__name__
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # A module may replace itself in sys.modules while it runs; importers get the replacement.
        self._after_import(name, sys.modules.get(name, module))
