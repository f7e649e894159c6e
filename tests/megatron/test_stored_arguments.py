"""Test that Megatron's own `load_args_from_checkpoint` gets the arguments of checkpoints that it cannot read."""

from __future__ import annotations

from argparse import Namespace

from megatron.training import checkpointing

from mcore_ckpt_ext.megatron.stored_arguments import wrap_load_args
from tests.harness.checkpoints import fixture_named


def test_the_arguments_of_a_zarr_checkpoint() -> None:
    source = fixture_named("p33")
    wanted = dict.fromkeys(("num_layers", "hidden_size", "swiglu", "tokenizer_type"))
    arguments = Namespace(
        **wanted, load=str(source.run), ckpt_format="torch_dist", ckpt_step=None, non_persistent_ckpt_type=None,
        use_tokenizer_model_from_checkpoint_args=True, use_mp_args_from_checkpoint_args=False,
    )  # fmt: skip
    wrap_load_args(checkpointing.load_args_from_checkpoint)(arguments)
    written = source.job["args"]
    assert {name: getattr(arguments, name) for name in wanted} == {name: written[name] for name in wanted}
    assert arguments.swiglu and arguments.num_layers == 2
