import importlib.util
import json
import sys
from argparse import Namespace
from types import ModuleType

import pytest

from mcore_ckpt_ext.megatron import flags
from mcore_ckpt_ext.megatron.flags import (
    asynchronous_save_changes,
    nvrx_problem,
    offload_hazard,
    wrap_parse_args,
)

MEGATRON = importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.training")


def _arguments(**differences):
    stock = {
        "async_save": True,
        "async_strategy": "nvrx",
        "use_persistent_ckpt_worker": False,
        "ckpt_format": "torch_dist",
        "save": "somewhere",
        "yaml_cfg": None,
    }
    return Namespace(**{**stock, **differences})


def _changes(arguments, command_line=(), version=(0, 19), problem="absent"):
    before = dict(vars(arguments))
    changes = asynchronous_save_changes(arguments, list(command_line), version, lambda: problem)
    assert vars(arguments) == before
    return {change.name: change.value for change in changes}


def _never():
    raise AssertionError("nvidia_resiliency_ext was asked for although its answer does not matter")


def test_the_worker_is_added_and_the_strategy_that_cannot_work_replaced():
    assert _changes(_arguments()) == {"use_persistent_ckpt_worker": True, "async_strategy": "mcore"}


def test_a_strategy_that_works_is_kept():
    assert _changes(_arguments(), problem=None) == {"use_persistent_ckpt_worker": True}


def test_a_worker_that_is_there_is_kept():
    assert _changes(_arguments(use_persistent_ckpt_worker=True)) == {"async_strategy": "mcore"}
    assert _changes(_arguments(use_persistent_ckpt_worker=True), problem=None) == {}


def test_mcore_requires_nothing_but_the_worker():
    changes = asynchronous_save_changes(_arguments(async_strategy="mcore"), [], (0, 19), _never)
    assert [change.name for change in changes] == ["use_persistent_ckpt_worker"]


@pytest.mark.parametrize("command_line", [["--async-strategy", "nvrx"], ["--async-strategy=nvrx"]])
@pytest.mark.parametrize("worker", [False, True])
def test_a_strategy_chosen_by_the_user_wins(command_line, worker):
    # Without our worker, stock saves synchronously; with it, the job would die where stock runs.
    assert _changes(_arguments(use_persistent_ckpt_worker=worker), command_line) == {}
    expected = {} if worker else {"use_persistent_ckpt_worker": True}
    assert _changes(_arguments(use_persistent_ckpt_worker=worker), command_line, problem=None) == expected


def test_a_flag_that_only_begins_alike_is_not_the_user_s_choice():
    assert "async_strategy" in _changes(_arguments(), ["--async-strategy-timeout", "3", "--async-save"])


@pytest.mark.parametrize(
    "differences",
    [
        {"async_save": False},
        {"save": None},
        {"ckpt_format": "torch"},
        {"ckpt_format": "torch_dcp"},
        {"ckpt_format": "fsdp_dtensor"},
        {"yaml_cfg": "job.yaml"},
    ],
)
def test_other_jobs_are_left_alone(differences):
    assert asynchronous_save_changes(_arguments(**differences), [], (0, 19), _never) == []


@pytest.mark.parametrize("version", [(0, 16), (0, 19)])
def test_no_persistent_writer_gets_an_offloaded_optimizer(version):
    arguments = _arguments(optimizer_cpu_offload=True)
    assert asynchronous_save_changes(arguments, [], version, _never) == []
    assert "so it is not switched on" in offload_hazard(arguments, version)
    assert offload_hazard(_arguments(), version) is None


def test_a_persistent_writer_that_the_user_chose_stays_with_a_warning():
    arguments = _arguments(optimizer_cpu_offload=True, use_persistent_ckpt_worker=True)
    assert _changes(arguments) == {"async_strategy": "mcore"}
    assert "can be a mixture of steps" in offload_hazard(arguments, (0, 14))
    assert offload_hazard(_arguments(optimizer_cpu_offload=True), (0, 14)) is None
    assert offload_hazard(_arguments(optimizer_cpu_offload=True, async_save=False), (0, 19)) is None


@pytest.mark.parametrize("absent", ["async_save", "use_persistent_ckpt_worker", "ckpt_format", "save"])
def test_a_version_without_the_argument_is_left_alone(absent):
    arguments = _arguments()
    delattr(arguments, absent)
    assert asynchronous_save_changes(arguments, [], (0, 19), _never) == []


def test_0_16_has_the_worker_but_no_strategy():
    arguments = _arguments()
    del arguments.async_strategy
    assert _changes(arguments, version=(0, 16)) == {"use_persistent_ckpt_worker": True}


@pytest.mark.parametrize("version", [(0, 7), (0, 12), (0, 15), None])
def test_versions_that_save_asynchronously_by_themselves_are_left_alone(version):
    assert asynchronous_save_changes(_arguments(), [], version, _never) == []


def test_every_change_gives_its_reason():
    changes = asynchronous_save_changes(_arguments(), [], (0, 19), lambda: "No module named 'nvidia_resiliency_ext'")
    reasons = {change.name: change.reason for change in changes}
    assert "No module named 'nvidia_resiliency_ext'" in reasons["async_strategy"]
    assert "0.19 switches --async-save off" in reasons["use_persistent_ckpt_worker"]


@pytest.mark.usefixtures("fresh_logger")
@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_the_wrapper_sets_them_and_says_so_in_one_line(monkeypatch, capsys, rank, lines):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(flags, "version_text", lambda: "0.19.2")
    monkeypatch.setattr(flags, "nvrx_problem", lambda: "too\nold")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--async-save"])
    arguments = wrap_parse_args(lambda extra=None: _arguments(extra=extra))(extra=3)
    assert (arguments.use_persistent_ckpt_worker, arguments.async_strategy, arguments.extra) == (True, "mcore", 3)
    written = capsys.readouterr().err
    assert len(written.splitlines()) == lines
    assert not lines or written.startswith("[mcore_ckpt_ext] --async-save: async_strategy = mcore")


def test_the_wrapper_says_nothing_where_nothing_changes(monkeypatch, capsys):
    monkeypatch.setattr(flags, "version_text", lambda: "0.15.0")
    assert wrap_parse_args(_arguments)() == _arguments()
    assert capsys.readouterr().err == ""


def _strategies(monkeypatch, get_async_strategy):
    name = "megatron.core.dist_checkpointing.strategies.torch"
    fake = ModuleType(name)
    if get_async_strategy:
        fake.get_async_strategy = get_async_strategy  # type: ignore[attr-defined]
    for count in range(1, 6):
        parent = ".".join(name.split(".")[:count])
        monkeypatch.setitem(sys.modules, parent, fake if parent == name else ModuleType(parent))


def _refusing(strategy):
    try:
        raise ImportError("no such symbol")
    except ImportError:
        raise ModuleNotFoundError("A compatible installation is required")  # noqa: B904 - as Megatron raises it


@pytest.mark.parametrize(
    ("get_async_strategy", "problem"),
    [
        (lambda strategy: (strategy, {"get_write_results_queue": lambda mp_mode="spawn": None}), None),
        (lambda strategy: (strategy, {"get_write_results_queue": lambda: None}), "no parameter mp_mode"),
        (lambda strategy: (strategy, {}), "get_write_results_queue"),
        (_refusing, "no such symbol"),
        (None, "get_async_strategy"),
    ],
)
def test_nvrx_is_judged_as_megatron_judges_it(monkeypatch, get_async_strategy, problem):
    _strategies(monkeypatch, get_async_strategy)
    found = nvrx_problem()
    assert found is None if problem is None else problem in found


@pytest.mark.thorough
@pytest.mark.skipif(not MEGATRON, reason="needs an installation of Megatron with megatron.training")
def test_genuine_megatron_is_patched_at_every_point_and_its_arguments_changed(python):
    finished = python(
        "import json, sys\n"
        "import megatron.training.arguments as arguments\n"
        "import mcore_ckpt_ext\n"
        "from megatron.training.arguments import parse_args\n"
        "sys.argv = ['pretrain_gpt.py', '--async-save', '--save', 'somewhere']\n"
        "args = parse_args()\n"
        "import megatron.core.package_info as info\n"
        "import megatron.training.training as training, megatron.training.checkpointing as checkpointing\n"
        "assert training.load_checkpoint is checkpointing.load_checkpoint\n"
        "states = {s.patch_point: (s.state, s.version, s.reason) for s in mcore_ckpt_ext.status()}\n"
        "mcore_ckpt_ext.uninstall()\n"
        "assert training.load_checkpoint is checkpointing.load_checkpoint\n"
        "assert 'mcore_ckpt_ext' not in training.load_checkpoint.__code__.co_filename\n"
        "json.dump([states, args.use_persistent_ckpt_worker, getattr(args, 'async_strategy', None),\n"
        "           args.async_save, info.__version__], sys.stdout)\n"
    )
    assert finished.returncode == 0, finished.stderr
    states, worker, strategy, asynchronous, version = json.loads(finished.stdout.splitlines()[-1])
    assert states["megatron.training.arguments.parse_args"] == ["patched", version, None]
    assert (worker, asynchronous) == (True, True)
    absent = importlib.util.find_spec("nvidia_resiliency_ext") is None
    assert not absent or strategy in {"mcore", None}
    assert finished.stderr.count("[mcore_ckpt_ext] --async-save:") == 1
    ours = {
        state
        for patch_point, (state, *_) in states.items()
        if patch_point.startswith(("megatron.core.", "megatron.tr"))
    }
    assert ours == {"patched"}
