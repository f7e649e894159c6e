"""Test a larger vocabulary: tokens without a row in the checkpoint, in genuine Megatron-LM.

Stock Megatron fails if it loads the optimizer; if it only loads weights, it sets the new rows to zero.
"""

from __future__ import annotations

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.job.dimensions import with_defaults
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from tests.harness.checkouts import EITHER
from tests.harness.jobs import SAVED, Job
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

ROWS, TOKENS = 128, 200
GROWN = ["--vocab-size", str(TOKENS), "--make-vocab-size-divisible-by", "128"]
KEEP = {"MCORE_CKPT_EXT_NEW_TOKENS": "keep"}
PIPELINE, TENSOR = Layout(1, 2, 2), Layout(2, 1, 2)
WEIGHTS = [*GROWN, "--no-load-optim"]
# In the order in which ranks are spread: models are initialized alike under one layout.
LAYOUTS = {"moved": TENSOR, "same": PIPELINE}
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.fixture(scope="module", params=EITHER)
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Untied embeddings, TP1 x PP2, with 128 rows for 127 tokens; then 200 tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    saved = folder / "saved"
    load = saved / "checkpoints"
    jobs = [Turn(saved, PIPELINE, saves=True, until=SAVED, more=LLAMA)]
    untrained = ["--lr", "0", "--min-lr", "0"]
    for name, layout in LAYOUTS.items():
        at = {"load": load, "until": SAVED + 1}
        jobs += [
            Turn(
                folder / f"{name}, fresh",
                layout,
                saves=True,
                until=SAVED,
                more=[*LLAMA, *GROWN, *untrained],
            ),
            Turn(folder / f"{name}, refused", layout, more=[*LLAMA, *GROWN], **at),
            Turn(folder / f"{name}, kept", layout, more=[*LLAMA, *GROWN], environment=KEEP, **at),
            Turn(folder / f"{name}, weights", layout, more=[*LLAMA, *WEIGHTS], **at),
            Turn(folder / f"{name}, weights kept", layout, more=[*LLAMA, *WEIGHTS], environment=KEEP, **at),
            Turn(folder / f"{name}, padding", layout, more=[*LLAMA, "--make-vocab-size-divisible-by", "256"], **at),
        ]
    return run_in_turn(folder, jobs, of_checkout=request.param)


def tokens_of(turns: Results) -> int:
    """Up to 0.17 the end of a document is one more (null_tokenizer.py)."""
    return TOKENS + (turns.megatron == "0.16")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_tokens_are_refused_and_named(layout: str, turns: Results) -> None:
    refused = turns[f"{layout}, refused"]
    assert refused.returncode != 0
    assert f"new are tokens 128 to {tokens_of(turns) - 1}" in refused.output
    assert "MCORE_CKPT_EXT_NEW_TOKENS=keep" in refused.output
    run = turns.folder(f"{layout}, refused").parent / "saved" / "checkpoints"
    sizes = {"tensor": LAYOUTS[layout].tensor, "pipeline": LAYOUTS[layout].pipeline}
    changes = {"vocab_size": TOKENS, "make_vocab_size_divisible_by": 128}
    rehearsed = rehearse(run, 2, with_defaults(sizes), changes=changes)
    assert str(rehearsed.refusal).splitlines()[-1] in refused.output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_they_are_kept_they_are_as_in_a_fresh_model(layout: str, turns: Results) -> None:
    saved, kept = assemble(turns.job("saved").at_save), assemble(turns.job(f"{layout}, kept").at_load)
    fresh, tokens = assemble(turns.job(f"{layout}, fresh").at_save), tokens_of(turns)
    for table in TABLES:
        for kind in ("weight", "fp32_param", "exp_avg", "exp_avg_sq"):
            name = f"{kind}.{table}"
            assert torch.equal(kept[name][:ROWS], saved[name][:ROWS])
            assert not kept[name][tokens:].any()
        assert kept[f"weight.{table}"][ROWS:tokens].any(dim=1).all()
        assert torch.equal(kept[f"weight.{table}"][ROWS:tokens], fresh[f"weight.{table}"][ROWS:tokens])
        weight = kept[f"weight.{table}"][ROWS:tokens]
        assert torch.equal(kept[f"fp32_param.{table}"][ROWS:tokens], weight.float())
        assert not kept[f"exp_avg.{table}"][ROWS:].any()
        assert not kept[f"exp_avg_sq.{table}"][ROWS:].any()
    (line,) = [one for one in turns.job(f"{layout}, kept").said if "optimizer resumed from" in one]
    assert (
        f"new are tokens 128 to {tokens - 1}: their rows keep the model's own initialization, with moments of" in line
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_weights_alone_is_reported_by_stock(layout: str, turns: Results) -> None:
    plain, kept = turns.job(f"{layout}, weights"), turns.job(f"{layout}, weights kept")
    tokens = tokens_of(turns)
    assert f"no row for tokens 128 to {tokens - 1}: Megatron sets their weights to zero" in plain.output
    assert f"new are tokens 128 to {tokens - 1}" in kept.output
    for table in TABLES:
        name = f"weight.{table}"
        assert not assemble(plain.at_load)[name][ROWS:].any()
        assert assemble(kept.at_load)[name][ROWS:tokens].any(dim=1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_may_grow_without_a_word(layout: str, turns: Results) -> None:
    result = turns[f"{layout}, padding"]
    assert "new are" not in result.output
    assert layout == "same" or _is_zero_beyond(turns.job(f"{layout}, padding"))


def _is_zero_beyond(job: Job) -> bool:
    found = assemble(job.at_load)
    return not any(found[f"{kind}.{table}"][ROWS:].any() for kind in ("weight", "fp32_param") for table in TABLES)
