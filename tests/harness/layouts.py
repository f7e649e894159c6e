"""Parallel layouts of test jobs."""

from __future__ import annotations

from dataclasses import dataclass

# The padded vocabulary of all jobs unless a test chooses another, so that weights and losses are comparable.
VOCABULARY = 128
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1")
SEQUENCE = ("--sequence-parallel",)
CONTEXT = "--context-parallel-size"
# Samples of an iteration, in all layouts (`toy_jobs.TINY_GPT`).
BATCH = 8


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a job; the remaining factor of ranks is data parallelism.

    Attributes:
        tensor: tensor parallel size.
        pipeline: number of pipeline stages.
        ranks: total number of ranks.
        virtual: whether stages are interleaved, with one layer per chunk.
        vocabulary: rows of the padded vocabulary.
        more: additional Megatron arguments that belong to the layout.
    """

    tensor: int
    pipeline: int
    ranks: int
    virtual: bool = False
    vocabulary: int = VOCABULARY
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        data = self.ranks // self.tensor // self.pipeline
        return f"TP{self.tensor} x PP{self.pipeline}{' x VPP2' if self.virtual else ''} x DP{data}"

    @property
    def data(self) -> int:
        """Return the data parallel size."""
        context = int(self.more[self.more.index(CONTEXT) + 1]) if CONTEXT in self.more else 1
        return self.ranks // self.tensor // self.pipeline // context

    @property
    def samples_at_once(self) -> int:
        """Return the micro-batch size: two of the eight samples of a batch, unless a stage would then lack work.

        Half as many passes cost half as much, and a job that is resumed under another layout has the same batches.
        """
        passes, rest = divmod(BATCH, 2 * self.data)
        return 2 if passes and not rest and passes % self.pipeline == 0 else 1

    @property
    def flags(self) -> list[str]:
        """Return Megatron's arguments other than TP and PP."""
        virtual = VIRTUAL if self.virtual else ()
        return [*virtual, *self.more, "--make-vocab-size-divisible-by", str(self.vocabulary // self.tensor)]


def expert_sizes(expert: int, expert_tensor: int) -> tuple[str, ...]:
    """Return Megatron's arguments for expert parallelism."""
    return ("--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", str(expert_tensor))


def experts_over(tensor: int, pipeline: int, ranks: int, expert: int) -> Layout:
    """Return a layout for experts; with TP they need sequence parallelism (megatron/training/arguments.py)."""
    sequence = SEQUENCE if tensor > 1 else ()
    return Layout(tensor, pipeline, ranks, more=(*sequence, *expert_sizes(expert, 1)))
