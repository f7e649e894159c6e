import json
import sys

import pytest

from tests.harness.torch_release import with_plugins

pytestmark = pytest.mark.thorough

TELL = """
import json, sys
import torch
import mcore_ckpt_ext
assert torch.ones(2).sum() == 2
"""
STATES = "json.dump(sorted({s.state for s in mcore_ckpt_ext.status()}), sys.stdout); print()\n"


def _states(finished):
    """What each `STATES` of the program told."""
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


@with_plugins
def test_import_torch_installs_the_hooks_until_they_are_uninstalled(python):
    finished = python(TELL + STATES + "mcore_ckpt_ext.uninstall()\n" + STATES)
    assert _states(finished) == [["waiting for import"], ["not patched"]]
    assert finished.stderr == ""


def test_the_switch_keeps_them_out(python):
    finished = python(TELL + STATES + "mcore_ckpt_ext.install()\n" + STATES, MCORE_CKPT_EXT="0")
    assert _states(finished) == [["not patched"], ["not patched"]]


def test_without_torch_s_autoload_they_are_installed_by_hand(python):
    finished = python(TELL + STATES + "mcore_ckpt_ext.install()\n" + STATES, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert _states(finished) == [["not patched"], ["waiting for import"]]


@with_plugins
def test_a_broken_hook_does_not_break_import_torch(python):
    for module in ("patching.registry", "megatron.patch_points"):
        finished = python(
            f"import sys; sys.modules['mcore_ckpt_ext.{module}'] = None\nimport torch; print(torch.ones(2).sum())"
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout == "tensor(2.)\n"
        assert len(finished.stderr.splitlines()) == 1
        assert "hooks are not installed: ModuleNotFoundError" in finished.stderr


@with_plugins
def test_even_an_exit_in_a_hook_does_not_end_the_program(python):
    finished = python(
        "import mcore_ckpt_ext.patching.registry as r\n"
        "def install(self): raise SystemExit(9)\n"
        "r.HookRegistry.install = install\n"
        "import torch; print('alive')"
    )
    assert (finished.returncode, finished.stdout) == (0, "alive\n")
    assert "SystemExit: 9" in finished.stderr


def test_imports_of_the_autoload(python):
    finished = python("import sys, mcore_ckpt_ext_autoload; mcore_ckpt_ext_autoload.register(); print(*sys.modules)")
    loaded = set(finished.stdout.split())
    ours = {name for name in loaded if name.startswith("mcore_ckpt_ext")}
    assert ours == {"mcore_ckpt_ext", "mcore_ckpt_ext_autoload"} | {
        f"mcore_ckpt_ext.{name}"
        for name in (
            "megatron",
            "megatron.installation",
            "megatron.patch_points",
            "patching",
            "patching.import_hook",
            "patching.log",
            "patching.patch_point",
            "patching.registry",
            "patching.singletons",
            "settings",
        )
    }
    assert not loaded & {"torch", "numpy", "megatron", "colossalai"}


@with_plugins
def test_spawned_workers_have_the_hooks_too(python, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import multiprocessing, torch, mcore_ckpt_ext\n"
        "def state(queue): queue.put({s.state for s in mcore_ckpt_ext.status()})\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        worker = context.Process(target=state, args=(queue,)); worker.start()\n"
        "        print(queue.get(timeout=120)); worker.join()\n"
    )
    finished = python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    if sys.platform == "linux":
        assert finished.stdout == "{'waiting for import'}\n" * 2, finished.stderr


def test_public_names_are_lazy_and_complete(python):
    finished = python(
        "import sys, mcore_ckpt_ext as m\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(m.__all__) <= set(dir(m))\n"
        "try: m.nothing\n"
        "except AttributeError as error: print(error)\n"
        "print(callable(m.install), callable(m.uninstall), callable(m.status), 'torch' in sys.modules)\n"
        "print(callable(m.open_checkpoint))\n"
    )
    assert finished.stdout.splitlines() == [
        "module 'mcore_ckpt_ext' has no attribute 'nothing'",
        "True True True False",
        "True",
    ], finished.stderr


def test_the_installed_version_is_the_package_s(python):
    finished = python(
        "import importlib.metadata as metadata, mcore_ckpt_ext\n"
        "print(metadata.version('mcore_ckpt_ext') == mcore_ckpt_ext.__version__)"
    )
    assert finished.stdout == "True\n"
