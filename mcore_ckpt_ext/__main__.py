"""`python -m mcore_ckpt_ext` is `mcore-ckpt`."""

from mcore_ckpt_ext.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
