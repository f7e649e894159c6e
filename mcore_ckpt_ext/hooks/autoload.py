"""Former location of the entry point, which is a file of its own now (`mcore_ckpt_ext_autoload.py`).

An old editable installation (``pip install --editable``) still names this module, and ``import torch`` would fail
until it is installed again.
"""

from __future__ import annotations


def register() -> None:
    """Install the hooks; never raise."""
    try:
        from mcore_ckpt_ext.megatron.installation import install

        install()
    except Exception as error:  # noqa: BLE001 - whatever escapes here breaks `import torch`
        import logging

        logging.getLogger("mcore_ckpt_ext").warning("hooks are not installed: %s: %s", type(error).__name__, error)
