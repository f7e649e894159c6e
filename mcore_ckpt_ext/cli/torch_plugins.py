"""Explains errors of entry points that ``import torch`` loads at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mcore_ckpt_ext.errors import UsageError

GROUP = "torch.backends"
OURS = "mcore_ckpt_ext"
_SYMPTOM = "Failed to load the backend extension: "
_UNTIL_THEN = "; until then, TORCH_DEVICE_BACKEND_AUTOLOAD=0"


@contextmanager
def explain_import_failures() -> Iterator[None]:
    """Explain how to repair the environment if an entry point makes `import torch` fail in this block.

    torch replaces any error of an entry point by a RuntimeError that names the entry point. So the import fails in
    every program of the environment (torch/__init__.py, `_import_device_backends`, 2.5 to 2.15).

    Raises:
        UsageError: `import torch` failed for this reason.
    """
    try:
        yield
    except RuntimeError as error:
        _, symptom, rest = str(error).partition(_SYMPTOM)
        if not symptom or isinstance(error, UsageError):
            raise
        name = rest.partition(". ")[0]
        raise UsageError(
            f"torch cannot be imported: its plugin {name} cannot be loaded",
            found=str(error.__cause__),
            hint=_remedy(name),
        ) from error


def is_registered() -> bool:
    """Return whether the entry point of this package is installed in the environment."""
    return any(name == OURS for name, _ in _plugins())


def _remedy(name: str) -> str:
    if name == OURS:
        return f"pip uninstall {OURS}, or install it again (pip install . in its clone){_UNTIL_THEN}"
    distribution = dict(_plugins()).get(name, name)
    return f"install {distribution} again, or pip uninstall {distribution}{_UNTIL_THEN}"


def _plugins() -> list[tuple[str, str]]:
    """Return name and distribution of each entry point of the group."""
    from importlib.metadata import entry_points  # imported late, so that `--help` is fast

    return [(entry.name, entry.dist.name if entry.dist else entry.name) for entry in entry_points(group=GROUP)]
