"""The entry point that torch calls at the end of ``import torch`` (group ``torch.backends``, torch >= 2.5)."""

from __future__ import annotations


def register() -> None:
    """Install the hooks; never raise.

    torch 2.5 to 2.13 turns any exception of an entry point into "Failed to load the backend extension"
    and so breaks ``import torch`` in every program of the machine
    (``torch/__init__.py:_import_device_backends``).
    """
    try:
        from mcore_ckpt_ext.hooks import install

        install()
    except BaseException as error:  # noqa: BLE001 - see above: whatever escapes here breaks `import torch`
        import logging

        logging.getLogger("mcore_ckpt_ext").warning("hooks are not installed: %s: %s", type(error).__name__, error)
