"""Test programs on Megatron Core alone: the one in the documentation, and one that does not call the package."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from mcore_ckpt_ext import TorchDist
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer
from tests.harness.programs import Programs

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "own-loop.md"
SIXTY, GROUPS = RANK_SCRIPTS / "sixty_lines.py", RANK_SCRIPTS / "own_groups.py"


def program_of_the_page() -> str:
    return PAGE.read_text().partition('```python title="needs a running job"\n')[2].partition("```")[0]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """TP1 x PP4 to TP2 x PP2 and others, in every way of loading."""
    found = Programs(tmp_path_factory.mktemp("loops"))
    own = found.folder / "own_loop.py"
    own.write_text(program_of_the_page())
    at = {
        name: found.place(name)
        for name in ("own", "again", "pp4", "verl", "experts", "frozen", "stub", "groups", "shifted", "root", "plain")
    }
    found.add("own", own, 1, 4, "none", at["own"])
    found.add("own, loaded", own, 2, 2, at["own"], at["again"])
    found.add("pp4", SIXTY, 1, 4, "none", at["pp4"], "together")
    found.add("stock refuses", SIXTY, 2, 2, at["pp4"], "none", "together", stock=True)
    found.add("together", SIXTY, 2, 2, at["pp4"], "none", "together")
    found.add("model-first", SIXTY, 4, 1, at["pp4"], "none", "model-first")
    found.add("optimizer-first", SIXTY, 2, 1, at["pp4"], "none", "optimizer-first")
    found.add("strict", SIXTY, 2, 2, at["pp4"], "none", "strict")
    found.add("strict, unmoved", SIXTY, 1, 4, at["pp4"], "none", "strict")
    for way in ("nested", "returned"):
        found.add(way, SIXTY, 2, 2, at["pp4"], "none", way)
    found.add("returned, unmoved", SIXTY, 1, 4, at["pp4"], "none", "returned")
    found.add("unmoved", SIXTY, 1, 4, at["pp4"], "none", "together")
    found.add("verl", SIXTY, 2, 2, "none", at["verl"], "verl", stock=True)
    found.add("verl, loaded", SIXTY, 1, 4, at["verl"], "none", "verl")
    found.add("root", SIXTY, 2, 2, "none", at["root"], "root")
    found.add("root, loaded", SIXTY, 1, 4, at["root"], "none", "root")
    found.add("root, unmoved", SIXTY, 2, 2, at["root"], "none", "root")
    found.add("verl, unmoved", SIXTY, 2, 2, at["verl"], "none", "verl")
    found.add("verl, unmoved, optimizer first", SIXTY, 2, 2, at["verl"], "none", "verl-first")
    found.add("verl, optimizer first", SIXTY, 1, 4, at["verl"], "none", "verl-first")
    found.add("experts", SIXTY, 1, 2, "none", at["experts"], "together", "experts")
    found.add("experts, loaded", SIXTY, 2, 1, at["experts"], "none", "together", "experts")
    found.add("frozen", SIXTY, 1, 4, "none", at["frozen"], "together", "frozen")
    found.add("frozen, loaded", SIXTY, 2, 2, at["frozen"], "none", "together", "frozen")
    found.add("stub", SIXTY, 1, 4, "none", at["stub"], "called", "stub")
    found.add("stub, loaded", SIXTY, 2, 2, at["stub"], "none", "together", "stub")
    found.add("twice", SIXTY, 2, 2, at["pp4"], "none", "together", "twice")
    found.add("stub, called", SIXTY, 2, 2, at["stub"], "none", "called", "stub")
    found.add("shifted", SIXTY, 1, 1, "none", at["shifted"], "together", "buckets")
    found.add("shifted, loaded", SIXTY, 1, 1, at["shifted"], "none", "together", "buckets")
    found.add("shifted, by stock", SIXTY, 1, 1, at["shifted"], "none", "together", "buckets", stock=True)
    plain = ("together", "plain")
    found.add("plain", SIXTY, 1, 4, "none", at["plain"], *plain)
    found.add("plain, loaded", SIXTY, 1, 4, at["plain"], "none", *plain)
    found.add("plain, by stock", SIXTY, 1, 4, at["plain"], "none", *plain, stock=True)
    found.add("plain, called", SIXTY, 1, 4, at["plain"], "none", "called", "plain")
    found.add("groups", GROUPS, 1, 4, "none", at["groups"])
    found.add("groups, loaded", GROUPS, 2, 1, at["groups"], "none")
    found.run()
    return found


def test_the_page_has_about_forty_statements() -> None:
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(program_of_the_page()))) < 48


def test_the_one_line_call(turns: Programs) -> None:
    """What was saved under TP1 x PP4 is alive under TP2 x PP2, before its steps go on; the sidecar placed it."""
    assert turns.ended["own, loaded"] == {"done"}
    said = [line for line in turns.output.splitlines() if "optimizer resumed from" in line]
    assert "optimizer resumed from TP1 x PP4 x DP1 as TP2 x PP2 x DP1: dp_reshardable" in said[0]
    assert "placed by the sidecar" in said[0]
    for name in ("own", "again"):
        checkpoint = open_checkpoint(turns.place(name))
        assert checkpoint.job.found_sidecar().sidecar is not None
        assert verify(checkpoint.files.folder).sound


WAYS = ["together", "model-first", "nested", "returned"]


@pytest.mark.parametrize("way", [*WAYS, "unmoved", "returned, unmoved"])
def test_a_program_that_does_not_import_the_package(turns: Programs, way: str) -> None:
    assert_same_optimizer(turns.dump("pp4"), turns.dump(way))


def test_megatron_core_loads_an_unchanged_layout(turns: Programs) -> None:
    """Under its own layout, of which the sidecar says more than the live job does."""
    assert "optimizer resumed from TP1 x PP4 x DP1 as TP1 x PP4 x DP1" not in turns.output


def test_saves_have_sidecars(turns: Programs) -> None:
    """A program that knows nothing of the package saves them all the same, where the hooks are."""
    assert open_checkpoint(turns.place("pp4")).job.found_sidecar().sidecar is not None
    assert open_checkpoint(turns.place("verl") / "optimizer" / "dist_ckpt").job.found_sidecar().sidecar is None
    assert str(open_checkpoint(turns.place("pp4")).job.layout) == "TP1 x PP4 x DP1"


def test_stock_refuses_the_same(turns: Programs) -> None:
    (ended,) = {re.sub(r" .*", "", line) for line in turns.ended["stock refuses"]}
    assert ended != "done"


def test_an_optimizer_before_its_model_is_refused_whole(turns: Programs) -> None:
    """On every rank alike: its masters are not those of the model's weights, which are still those of the start."""
    (ended,) = turns.ended["optimizer-first"]
    refusal = "mcore_ckpt_ext refused while proving the masters against the weights; the optimizer is unchanged"
    assert ended.startswith(f"ResumeRefusedError: {refusal}")
    assert "load the weights of the same checkpoint first" in ended


def test_a_load_that_leaves_nothing_over(turns: Programs) -> None:
    """Megatron Core is not asked for the optimizer that is planned instead; a program may want all keys asked for."""
    (ended,) = {line.partition(":")[0] for line in turns.ended["strict"]}
    assert ended == "CheckpointingException"
    assert all("optimizer." in line for line in turns.ended["strict"])
    assert_same_optimizer(turns.dump("pp4"), turns.dump("strict, unmoved"))


def test_weights_that_lie_elsewhere(turns: Programs) -> None:
    """The optimizer's own folder has neither weights nor a layout: it is tried, and proven by the live weights."""
    assert_same_optimizer(turns.dump("verl"), turns.dump("verl, loaded"))
    assert "optimizer resumed from TP2 x PP2" in turns.output


@pytest.mark.parametrize("way", ["root, loaded", "root, unmoved"])
def test_an_optimizer_that_is_all_that_is_loaded(turns: Programs, way: str) -> None:
    """Its state dict is the root of the tree, as Megatron's own tests have it."""
    assert_same_optimizer(turns.dump("root"), turns.dump(way))


def test_an_optimizer_in_a_folder_of_its_own_under_its_own_layout(turns: Programs) -> None:
    """Its arrays are those that the live optimizer has, so Megatron loads it; what it loads is compared on samples."""
    assert_same_optimizer(turns.dump("verl"), turns.dump("verl, unmoved"))
    assert "optimizer resumed from TP2 x PP2 x DP1 as TP2 x PP2" not in turns.output


def test_an_optimizer_in_a_folder_of_its_own_before_its_weights(turns: Programs) -> None:
    """Megatron loads it, and that it is not verified is said; under another layout, what is missing is named."""
    assert_same_optimizer(turns.dump("verl"), turns.dump("verl, unmoved, optimizer first"))
    (line,) = (line for line in turns.output.splitlines() if "is loaded by Megatron and not verified" in line)
    assert "the live weights are not those of its masters" in line
    (ended,) = turns.ended["verl, optimizer first"]
    assert "load the weights of the same checkpoint first" in ended
    assert "damaged" not in ended


def test_their_folder_offline(turns: Programs, tmp_path: Path) -> None:
    """The checkpoints of a step are seen as one."""
    step = turns.place("verl")
    found = inspect(step)
    assert found.layout_text == "TP2 x PP2 x DP1 (VPP not known)"
    assert verify(step).sound
    convert(step, tmp_path / "out", TorchDist())
    assert compare(step, tmp_path / "out").equal
    alone = tmp_path / "step"
    shutil.copytree(step / "optimizer", alone / "optimizer")
    with pytest.raises(CheckpointError, match=r"without weights.*--weights FOLDER"):
        convert(alone, tmp_path / "none", TorchDist())
    weights = step / "model" / "dist_ckpt"
    assert verify(alone, weights=weights).sound
    convert(alone, tmp_path / "lent", TorchDist(), weights=weights)
    assert compare(step, tmp_path / "lent", kinds=["weight", "fp32_param", "exp_avg", "exp_avg_sq"]).equal


def test_shifted_masters_are_refused(turns: Programs) -> None:
    """It would load the state of other parameters, and nothing would show it: no proof follows its load here.

    Without the sizes of buckets among what is known of the job, it is not repaired.
    """
    assert any("masters do not round to their weights" in one.what for one in verify(turns.place("shifted")).findings)
    assert turns.ended["shifted, by stock"] == {"done"}
    (ended,) = turns.ended["shifted, loaded"]
    assert "the optimizer is unchanged" in ended


def test_masters_that_stock_copies_into_other_groups(turns: Programs) -> None:
    """Stages without embeddings have an empty group before those of the norms; the refusal names the call to use."""
    with pytest.raises(AssertionError):
        assert_same_optimizer(turns.dump("plain"), turns.dump("plain, by stock"))
    (ended,) = turns.ended["plain, loaded"]
    assert "Megatron would copy the optimizer's masters into other parameters" in ended
    assert "call mcore_ckpt_ext.load_optimizer" in ended
    assert_same_optimizer(turns.dump("plain"), turns.dump("plain, called"))


def test_experts(turns: Programs) -> None:
    assert_same_optimizer(turns.dump("experts"), turns.dump("experts, loaded"))


def test_stages_that_are_frozen(turns: Programs) -> None:
    """Their ranks have optimizers without parameters, and take part."""
    assert_same_optimizer(turns.dump("frozen"), turns.dump("frozen, loaded"))


def test_ranks_whose_optimizer_is_a_stub(turns: Programs) -> None:
    """A program passes over them, so that they cannot take part unseen: refused on every rank; the call serves them."""
    (ended,) = turns.ended["stub, loaded"]
    assert ended.startswith("ResumeRefusedError: ")
    assert "no optimizer on rank 0, 1, as happens if a rank trains no parameter" in ended
    assert f"no sidecar in {turns.place('stub')}: a rank has no optimizer" in turns.output
    assert open_checkpoint(turns.place("stub")).job.found_sidecar().sidecar is not None  # by the call
    assert_same_optimizer(turns.dump("stub"), turns.dump("stub, called"))


def test_ranks_that_request_different_numbers_of_optimizers(turns: Programs) -> None:
    """All ranks end with one refusal, and none waits for the others."""
    (ended,) = turns.ended["twice"]
    assert ended.startswith("ResumeRefusedError: ")
    assert "no optimizer on rank 1 to 3, as happens" in ended


def test_process_groups_of_the_programs_own(turns: Programs) -> None:
    """TP1 x PP4 to TP2 x PP1 x DP2, where Megatron's global groups do not exist."""
    assert_same_optimizer(turns.dump("groups"), turns.dump("groups, loaded"))
    assert str(open_checkpoint(turns.place("groups")).job.layout) == "TP1 x PP4 x DP1"
    assert open_checkpoint(turns.place("groups")).job.found_sidecar().sidecar is not None
