"""Every optimizer that a toy job trains outlives the death of a node, in the installed Megatron and in a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble
from megatron_on_cpu.elastic_jobs import Scenario

from tests.harness.checkouts import EITHER, checkout_job, version
from tests.harness.elastic import elastic_arguments
from tests.harness.jobs import differing
from tests.harness.models import GATED_EXPERTS
from tests.harness.sources import PLUGINS, SOURCES, Source

OPTIMIZERS = {
    "Adam": Source(),
    "Adam, fully reshardable": Source(["--dist-ckpt-optim-fully-reshardable"]),
    "Adam, experts": Source(GATED_EXPERTS),
    "Adam, not distributed": SOURCES["p41"],
    "Adam, not distributed, fp32": SOURCES["p42"],
    "Adam, offloaded": SOURCES["p45"],
    "Adam, half of it offloaded": SOURCES["p46"],
    "Adam, precision-aware": SOURCES["p47"],
    "Adam, moments in bf16": SOURCES["p48"],
    "Muon": SOURCES["p43"],
    "Muon, distributed": SOURCES["p44"],
}


@pytest.mark.parametrize("of_checkout", EITHER)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_live_optimizer_is_that_of_the_checkpoint(name: str, of_checkout: bool, tmp_path: Path) -> None:
    if "Muon" in name and of_checkout and version() == "0.16":
        pytest.skip("the Muon of 0.16 does not run with emerging-optimizers 0.3.0")
    source = OPTIMIZERS[name]
    kept = {option: source.options[option] for option in ("optimizer", "precision") if option in source.options}
    ended = Scenario(
        tmp_path,
        elastic_arguments(tmp_path, more=source.more, **kept),
        gates=[5],
        steps=[("at gate 5", "SIGKILL", 1), ("agent 1 ended", "open", 5)],
        environment=source.options.get("environment", {}),
        plugins=[*PLUGINS, *source.plugins],
        **(checkout_job() if of_checkout else {}),
    ).run()
    assert ended.codes == {"0": 0, "1": -9}
    assert [choice.split(":")[0] for choice in ended.choices] == ["2 of 2 GPUs"]
    assert [sorted(ended.losses(start)) for start in (0, 1)] == [[1, 2, 3, 4, 5], [5, 6, 7, 8]]
    saved, loaded = assemble(ended.dump(0, "after_save_0000004")), assemble(ended.dump(1, "after_load"))
    assert "weight" in (kinds := {key.partition(".")[0] for key in saved})
    assert kinds & {"exp_avg", "momentum_buffer"}
    assert differing(saved, loaded) == []
    assert ended.left == []
