"""Compare the load policy with stock Megatron in jobs of Megatron-FSDP and torch's FSDP.

The same loads run by stock Megatron alone and with this package; see `test_policy_truth.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checkpoints import fixture_named
from tests.harness.fsdp import FSDP, PLUGINS, TORCH_FSDP, live_state, loading, reported
from tests.harness.jobs import OFF, differing, run_job
from tests.harness.layouts import Layout

pytestmark = pytest.mark.nightly

EXPLAIN = {"MCORE_CKPT_EXT_EXPLAIN": "1"}
STOCK, PLUGIN = "stock Megatron loads the optimizer", "this package fills the optimizer"
LAYOUT = Layout(1, 1, 4)
# Each by a job: another format than its own first, so that what it leaves alive is not what the other one holds.
LOADS = {"Megatron-FSDP": ("p10", "p50"), "torch's FSDP": ("p32", "p51")}
ROWS = [(kind, name) for kind, names in LOADS.items() for name in names]
DECISIONS = {"p10": PLUGIN, "p50": STOCK, "p32": PLUGIN, "p51": PLUGIN}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """The folder and the output of each job, by `kind` and by `kind alone`, of stock Megatron."""
    found, folder = {}, tmp_path_factory.mktemp("policy")
    for kind, names in LOADS.items():
        for name, own in ((kind, EXPLAIN), (f"{kind} alone", OFF)):
            options = {"more": FSDP} if kind == "Megatron-FSDP" else {"more": TORCH_FSDP, "optimizer": ()}
            environment = {**loading(folder / name, {one: fixture_named(one).run for one in names}), **own}
            result = run_job(folder / name, LAYOUT, environment=environment, plugins=PLUGINS, **options)
            found[name] = folder / name, result.output
    return found


def ends_as_saved(folder: Path, kind: str, name: str) -> bool:
    """Whether a load ended in the saved state; Megatron-FSDP makes its weights of its masters."""
    if not (folder / f"{name}.json").is_file() or reported(folder, name)["error"] is not None:
        return False
    has_weights = kind != "Megatron-FSDP"
    truth, live = (
        {key: value for key, value in tensors.items() if has_weights or not key.startswith("weight.")}
        for tensors in (fixture_named(name).truth, live_state(folder, name))
    )
    return differing(truth, live) == [] and {group["step"] for group in reported(folder, name)["groups"]} == {4}


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_stock_succeeds_where_the_policy_chooses_it(kind: str, name: str, outputs: dict[str, tuple[Path, str]]) -> None:
    folder, output = outputs[kind]
    assert ends_as_saved(folder, kind, name), output[-3000:]
    decided = [line for line in output.splitlines() if f"{name}_" in line and (STOCK in line or PLUGIN in line)]
    assert len(decided) == 1, decided
    assert DECISIONS[name] in decided[0]
    assert ends_as_saved(outputs[f"{kind} alone"][0], kind, name) == (DECISIONS[name] == STOCK)
