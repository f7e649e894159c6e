"""Test the stage layouts of jobs: they are parsed as by genuine Megatron-LM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout, layers_by_chunk, prediction_chunk
from mcore_ckpt_ext.layout.stage_layout import StageLayout
from tests.harness.checkouts import EITHER, VARIABLE
from tests.harness.jobs import OFF

# (layout, pipeline ranks)
STATED: list[tuple[str | list[list[str]], int]] = [
    ("Et|tttL", 2),
    ("E|tt|t|tL", 2),
    ("E|tt|t|tL", 4),
    ("Ettt|(tt|)*3,m|L", 3),
    ("Ettt|(tt|)*3,m|L", 6),
    ("E,t*2|(tt|)*2,ttmmL", 4),
    ("E(t|t)*3,L", 2),
    ("E||ttt|L", 2),
    ([["embedding", "decoder"], ["Decoder ", "mtp", "loss"]], 2),
    ([["embedding"], ["decoder"], ["decoder", "decoder"], ["loss"]], 2),
]

# What genuine Megatron makes of each: kinds by pipeline rank and virtual stage.
READ = """
import json, sys
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout as Layout
read = lambda stated, ranks: [[[kind.name for kind in stage] for stage in own] for own in Layout(stated, ranks).layout]
print(json.dumps([read(stated, ranks) for stated, ranks in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module", params=EITHER)
def genuine(request: pytest.FixtureRequest) -> list[list[list[list[str]]]]:
    environment = {**os.environ, **OFF}
    import_module("megatron.core")  # skipped where it cannot be installed: tests/conftest.py
    if request.param:
        environment["PYTHONPATH"] = os.environ[VARIABLE]
    result = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(STATED)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found: list[list[list[list[str]]]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.thorough
def test_every_chunk_holds_what_megatron_builds(genuine: list[list[list[list[str]]]]) -> None:
    for (stated, ranks), chunks in zip(STATED, genuine, strict=True):
        total = sum(stage.count("decoder") for own in chunks for stage in own)
        arguments = JobArguments.of(
            {
                "pipeline_model_parallel_layout": stated,
                "pipeline_model_parallel_size": ranks,
                "virtual_pipeline_model_parallel_size": len(chunks[0]),
                "num_layers": total,
            }
        )
        layout = ParallelLayout.from_arguments(arguments)
        layers = layers_by_chunk(arguments, layout)
        assert layers is not None
        assert [[len(span) for span in own] for own in layers] == [
            [stage.count("decoder") for stage in own] for own in chunks
        ]
        # Layers are numbered in the order in which the model passes the chunks.
        passed = [layers[rank][stage] for stage in range(len(chunks[0])) for rank in range(ranks)]
        assert [number for span in passed for number in span] == list(range(total))
        predicting = [
            (rank, stage) for rank, own in enumerate(chunks) for stage, kinds in enumerate(own) if "mtp" in kinds
        ]
        assert prediction_chunk(arguments, layout) == (predicting[0] if predicting else None)


@pytest.mark.parametrize(
    "stated",
    [
        "Et|x|L",
        ["decoder"],
        [["decoder", 7]],
        [["encoder"]],
        7,
        "(tt|)*999999",
        "t*999999",
        "(" * 1000 + "t*9999999",
    ],
)
def test_invalid_layouts_are_unknown(stated: object) -> None:
    """Arguments are data from strangers: none makes more of itself than a pipeline has layers."""
    assert StageLayout.parse(stated) is None


def test_a_layout_of_other_sizes_is_not_known() -> None:
    for changed in (
        {"num_layers": 5},
        {"virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 3},
    ):
        arguments = JobArguments.of(
            {
                "pipeline_model_parallel_layout": "Et|tttL",
                "pipeline_model_parallel_size": 2,
                "num_layers": 4,
                **changed,
            }
        )
        assert layers_by_chunk(arguments, ParallelLayout.from_arguments(arguments)) is None
