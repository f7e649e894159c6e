"""How the ranks of a job are spread."""

from __future__ import annotations

from dataclasses import dataclass

# The padded vocabulary that all jobs share unless a test says otherwise: weights and losses are comparable.
VOCABULARY = 128
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1")
SEQUENCE = ("--sequence-parallel",)


@dataclass(frozen=True)
class Layout:
    """How a job is spread over ranks; data parallelism is what is left.

    Attributes:
        tensor: size of tensor parallelism.
        pipeline: number of pipeline stages.
        ranks: how many there are in all.
        virtual: whether every stage is interleaved, one layer a piece.
        vocabulary: rows of the padded vocabulary.
        more: further arguments of Megatron's that belong to the layout.
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
    def flags(self) -> list[str]:
        """Megatron's arguments beyond TP and PP."""
        virtual = VIRTUAL if self.virtual else ()
        return [*virtual, *self.more, "--make-vocab-size-divisible-by", str(self.vocabulary // self.tensor)]


def expert_sizes(expert: int, expert_tensor: int) -> tuple[str, ...]:
    """Megatron's arguments of expert parallelism."""
    return ("--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", str(expert_tensor))


def experts_over(tensor: int, pipeline: int, ranks: int, expert: int) -> Layout:
    """With tensor parallelism experts need sequence parallelism (megatron/training/arguments.py)."""
    sequence = SEQUENCE if tensor > 1 else ()
    return Layout(tensor, pipeline, ranks, more=(*sequence, *expert_sizes(expert, 1)))
