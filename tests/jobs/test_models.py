"""Test models beyond the plain GPT, saved and resumed by genuine Megatron-LM 0.19.2 under other layouts.

The live optimizer right after the resume equals the one that was saved, element for element.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.jobs import differing, resume, train_and_save
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import EXPERT_BIAS, GATED, GATED_EXPERTS, LATENT, LLAMA, SHARED_EXPERTS
from tests.harness.rehearsals import rehearsal_of_resume

pytestmark = pytest.mark.nightly

UNEVEN = ("--decoder-first-pipeline-num-layers", "1")
# A Llama-Nemotron of four layers: one has no attention, another no MLP, and their MLPs differ in width.
LAYERS = Path(__file__).parents[1] / "huggingface" / "own_code" / "nemotron-nas" / "config.json"
DIFFERING = [*LLAMA, "--hidden-size", "16", "--rotary-base", "500000", "--use-rope-scaling"]
DIFFERING += ["--use-rotary-position-embeddings", "--heterogeneous-layers-config-path", str(LAYERS)]
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "3000")

CASES = {
    "experts": (
        GATED_EXPERTS,
        experts_over(2, 2, 8, 2),
        [experts_over(1, 2, 8, 4), experts_over(1, 4, 4, 1), experts_over(2, 1, 4, 1)],
    ),
    "shared experts, layer frequency, expert bias": (
        [*GATED_EXPERTS, *SHARED_EXPERTS, *EXPERT_BIAS],
        experts_over(1, 2, 4, 2),
        [experts_over(1, 1, 4, 4), experts_over(2, 1, 2, 1)],
    ),
    "latent attention": (LATENT, Layout(2, 2, 4), [Layout(1, 4, 4), Layout(1, 1, 2)]),
    "uneven pipeline, to even and interleaved": (
        GATED,
        Layout(1, 2, 4, more=UNEVEN),
        [Layout(2, 2, 4), Layout(1, 2, 4, virtual=True)],
    ),
    "layers that differ": (DIFFERING, Layout(2, 2, 4), [Layout(1, 4, 4)]),
    "several buckets": ([], Layout(1, 2, 4, more=BUCKETS), [Layout(1, 2, 4), Layout(2, 1, 4, more=BUCKETS)]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_live_optimizer_equals_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    model, source, targets = CASES[name]
    saved = train_and_save(tmp_path / "saved", source, more=model)
    for number, target in enumerate(targets):
        resumed = resume(tmp_path / str(number), target, saved.run, more=model)
        assert resumed.summary, target
        assert differing(assemble(saved.at_save), assemble(resumed.at_load)) == [], target
        rehearsed = rehearsal_of_resume(saved.run, target)
        assert rehearsed.will_succeed, f"{target}: {rehearsed.refusal}"
