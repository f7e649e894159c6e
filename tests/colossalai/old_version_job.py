"""A program of test_old_versions.py: it runs a checkout of ColossalAI 0.2 or 0.3 on CPU ranks."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]
warnings.simplefilter("ignore")

import torch  # noqa: E402 - the lines above say where things are
import torch.distributed as dist  # noqa: E402
from colossalai_on_cpu import old_versions, ranks  # noqa: E402
from torch import nn  # noqa: E402

from mcore_ckpt_ext import zero_strict_state_dict as strict  # noqa: E402
from mcore_ckpt_ext.colossalai import classes  # noqa: E402
from tests.colossalai.jobs import same_bits  # noqa: E402
from tests.colossalai.models import TinyGPT  # noqa: E402


class WithIgnored(TinyGPT):
    """A parameter that ColossalAI is told to leave alone comes before those that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored = nn.Parameter(torch.linspace(-1, 1, 8))


def _first(*locations: str) -> Any:
    for location in locations:
        module, _, name = location.partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(locations)


def job(placement: str) -> None:
    """Construct, save, load, and compare with a plain module of the same seed."""
    from colossalai.context import ParallelMode
    from colossalai.core import global_context

    rank, world_size = dist.get_rank(), dist.get_world_size()
    global_context._register_dist(
        rank, world_size, dist.group.WORLD, None, list(range(world_size)), ParallelMode.GLOBAL
    )
    new_group = dist.new_group
    # These versions ask for nccl by name.
    dist.new_group = lambda members=None, *_, **__: new_group(members)
    gemini = _first("colossalai.nn.parallel:GeminiDDP", "colossalai.zero:GeminiDDP")
    context = _first("colossalai.zero:ColoInitContext", "colossalai.utils.model.colo_init_context:ColoInitContext")

    def wrapped(seed: int) -> Any:
        torch.manual_seed(seed)
        with context(device=torch.device("cpu")):
            module = WithIgnored()
        module.ignored._ddp_to_ignore = True  # type: ignore[attr-defined]
        return gemini(
            module, device=torch.device("cuda:0"), placement_policy=placement, hidden_dim=32, search_range_mb=1,
            min_chunk_size_mb=0.001,
        )  # fmt: skip

    torch.manual_seed(0)
    plain = WithIgnored().state_dict()
    plain["ignored"] = plain["ignored"].half().float()
    model = wrapped(0)
    own = model.state_dict(only_rank_0=False)
    wrong = [name for name in plain if name not in own or not torch.equal(own[name].float(), plain[name])]
    print("not as in the module:", ", ".join(wrong))
    assert wrong, "the negative control"
    strict.install()
    wrapper = classes.find(classes.WRAPPER)
    assert wrapper is not None
    assert wrapper.__name__ == "ZeroDDP"
    assert strict.status()[0].state == "patched"
    state = model.state_dict(only_rank_0=False)
    assert same_bits(state, plain)
    assert state["wte.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
    assert (model.state_dict() == {}) == bool(rank)
    static = strict.get_static_torch_model(model, only_rank_0=False)
    assert static.lm_head.weight is static.wte.weight
    reference = WithIgnored()
    reference.load_state_dict(plain)
    tokens = torch.arange(8).view(1, 8)
    assert torch.equal(static(tokens), reference(tokens))
    other = wrapped(1)
    other.load_state_dict(state)
    assert same_bits(other.state_dict(only_rank_0=False), plain)
    assert same_bits(other.state_dict(only_rank_0=False, strict=False), own)
    strict.uninstall()
    assert same_bits(model.state_dict(only_rank_0=False), own)


if __name__ == "__main__":
    old_versions.install(Path(sys.argv[1]))
    for ranks_of_world in (1, 2):
        for policy in ("cuda", "cpu"):
            ranks.run(ranks_of_world, job, policy)
    print("done")
