"""The entry point that torch calls at the end of ``import torch`` (group ``torch.backends``, torch >= 2.5).

torch 2.5 to 2.15 turns whatever is raised on the way to an entry point, or in it, into "Failed to load the backend
extension", and so breaks ``import torch`` in every program of the machine (``torch/__init__.py``,
``_import_device_backends``). An installation of this package that is damaged, or half removed, must not do that: so the
target of the entry point is this one file beside the package, and nothing of the package is imported outside of a try.
"""


def register() -> None:
    """Install the hooks; never raise, unless the user interrupts the program."""
    try:
        from mcore_ckpt_ext.megatron.installation import install

        install()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - see above: whatever escapes here breaks `import torch`
        _tell(error)


def _tell(error: BaseException) -> None:
    try:
        import logging

        logging.getLogger("mcore_ckpt_ext").warning(
            "mcore_ckpt_ext: the hooks are not installed: %s: %s; torch and Megatron run as if this package were not "
            "there. hint: install it again, or remove all of it (pip uninstall mcore_ckpt_ext)",
            type(error).__name__,
            error,
        )
    except Exception:  # noqa: BLE001 - of a handler of the program, say; what cannot be told is no reason either
        return
