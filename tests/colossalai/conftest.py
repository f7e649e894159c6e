"""Runs the genuine ColossalAI on CPU ranks; without ColossalAI, these tests are left out."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

if find_spec("colossalai") is None:
    # scripts/run_tests.py runs this folder with the environment that has it.
    collect_ignore_glob = ["test_*.py"]
else:
    from colossalai_on_cpu import redirect

    import tests.colossalai.on_device  # noqa: F401  # see there: before the redirection

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        redirect.install()
        # Imported once: the ranks are forked from here, and each would import it again.
        import transformers.models.gpt2.modeling_gpt2
        import transformers.models.t5.modeling_t5  # noqa: F401
