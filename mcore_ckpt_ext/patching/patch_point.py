"""Functions of frameworks that this package wraps, as data; checks that a module has one as expected."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

Function = Callable[..., Any]
State = Literal["waiting for import", "patched", "not patched", "not needed"]


class PatchPoint(NamedTuple):
    """One function of a framework that this package wraps.

    It is a named tuple, since every ``import torch`` pays for this class, and a dataclass takes ten times as long to
    make.

    Args:
        locations: where releases define it, the newest first, as "module:function" or "module:Class.method". In each
            module the first that is there is wrapped; a module without any is no problem while another has one.
        wrapper: "module:function" of the factory that takes the original and returns its replacement;
            imported only after the framework's module.
        parameters: names that the original must accept, in this order; there may be others in between.
        version_module: the module whose ``__version__`` is the framework's version.
        raises: types of errors that the original raises, as "module:class". If the wrapper raises an error of this
            package, that error becomes an instance of them (see `replaced_errors`).
        reads: the names that the wrapper reads from the globals of the original, or as "module:name" from another
            module, once that is imported. Without one of them it is not wrapped, unless the framework's release is
            older than the name (`FIRST_WITH_NAME`, job/release_names.py).
    """

    locations: tuple[str, ...]
    wrapper: str
    parameters: tuple[str, ...] = ()
    version_module: str | None = None
    raises: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.locations[0].replace(":", ".")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of all locations, each once."""
        return tuple(dict.fromkeys(location.partition(":")[0] for location in self.locations))

    def attributes(self, module: str) -> list[str]:
        """Return the names that the function may have in a module, the newest first."""
        places = (location.partition(":") for location in self.locations)
        return [attribute for name, _, attribute in places if name == module]


class PatchPointStatus(NamedTuple):
    """The state of one patch point.

    Attributes:
        patch_point: the function, with its module; of several locations the newest.
        state: whether it is patched.
        version: the framework's version, or None if it is not imported.
        reason: why it is not patched, or None.
    """

    patch_point: str
    state: State
    version: str | None = None
    reason: str | None = None


class PatchPointMismatchError(Exception):
    """A framework's function does not have the expected form."""


class Place(NamedTuple):
    """A module and the name of a function in it, ``Class.method`` for a method."""

    module: ModuleType
    attribute: str

    def function(self) -> Any:
        """Return the function; None if there is none, or if a class only inherits it."""
        owner, _, name = self.attribute.rpartition(".")
        return vars(getattr(self.module, owner, object)).get(name) if owner else getattr(self.module, name, None)


def place_in(patch_point: PatchPoint, name: str, module: ModuleType) -> Place | None:
    """Return the place of the function in a module; None if the module has it under none of its names."""
    places = (Place(module, attribute) for attribute in patch_point.attributes(name))
    return next((place for place in places if callable(place.function())), None)


def is_imported(patch_point: PatchPoint) -> bool:
    """Return True if a module that has been imported has the function."""
    imported = [(name, sys.modules[name]) for name in patch_point.modules if name in sys.modules]
    return any(place_in(patch_point, name, module) is not None for name, module in imported)


def may_be_imported(name: str) -> bool:
    """Return True if a module exists and is not imported, as far as is known without importing anything."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    missing = next((parent for parent in names if parent not in sys.modules), None)
    return missing is not None and find_spec(missing) is not None


def is_older_than(version: str | None, name: str) -> bool:
    """Return True if a release of Megatron precedes the first with a name that the wrappers know."""
    from mcore_ckpt_ext.job.release_names import precedes_name  # imported late: `import torch` pays for this module

    return precedes_name(version, name)


def checked_function(patch_point: PatchPoint, place: Place) -> Function:
    """Return the function to wrap, or raise PatchPointMismatchError if it is not as expected."""
    target = place.function()
    try:
        names = iter(inspect.signature(target).parameters)
    except ValueError as error:
        raise PatchPointMismatchError(f"its parameters cannot be read: {error}") from error
    # `in` consumes the iterator up to the name that it finds, so this also checks the order.
    if not all(name in names for name in patch_point.parameters):
        actual = ", ".join(inspect.signature(target).parameters)
        raise PatchPointMismatchError(
            f"expected the parameters ({', '.join(patch_point.parameters)}), found ({actual})"
        )
    scope = getattr(inspect.unwrap(target), "__globals__", {})
    version = version_of(patch_point)
    missing = [name for name in patch_point.reads if not (_has(scope, name) or is_older_than(version, name))]
    if missing:
        module = scope.get("__name__", place.module.__name__)
        places = [name if ":" in name else f"{module}:{name}" for name in missing]
        raise PatchPointMismatchError(f"there is no {', '.join(places)}, which the wrapper needs".replace(":", "."))
    function: Function = target
    return function


def _has(scope: Mapping[str, Any], name: str) -> bool:
    """Return True if a scope has a name; "module:name" may also be of a module not imported yet."""
    module, _, attribute = name.rpartition(":")
    if not module:
        return attribute in scope
    return module not in sys.modules or hasattr(sys.modules[module], attribute)


def version_of(patch_point: PatchPoint) -> str | None:
    """Return the version of the framework; None if it is unknown, or not imported."""
    module = sys.modules.get(patch_point.version_module or "")
    version = getattr(module, "__version__", None)
    return None if version is None else str(version)
