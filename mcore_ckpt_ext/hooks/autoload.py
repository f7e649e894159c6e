"""Where the entry point was before it had a file of its own, beside the package (`mcore_ckpt_ext_autoload.py`).

An installation in place (``pip install --editable``) that was made then still names this module, and ``import torch``
would break for it until it is made anew.
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
