"""A parallel layout for a model, as the rules and the estimates see it."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.continuity.batch_sizes import batch_divisor, global_batch_of, sizes_to_come
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.model_sizes import number_of
from mcore_ckpt_ext.layout_choice.model_table import ModelTable
from mcore_ckpt_ext.layout_choice.stage_split import StageSplit
from mcore_ckpt_ext.versions import Version


def batch_of(job: JobArguments) -> tuple[int, int | None]:
    """Return the micro batch, 1 if unknown, and the global batch of a job, None if unknown."""
    return job.micro_batch_size or 1, global_batch_of(job)


@dataclass(frozen=True, slots=True)
class Choice:
    """A parallel layout for a model, with the batch to train under it.

    Attributes:
        job: arguments of the model; its old layout in them is ignored.
        layout: the parallel sizes; `world` is the number of GPUs.
        split: the layers of each stage; None if they cannot be divided.
        micro_batch: samples that one data-parallel rank processes at once.
        global_batch: samples of an iteration.
        version: the Megatron release that would run.
    """

    job: JobArguments
    table: ModelTable
    layout: ParallelLayout
    split: StageSplit | None
    micro_batch: int
    global_batch: int
    version: Version

    @property
    def microbatches(self) -> int:
        """Micro batches that each pipeline processes in an iteration."""
        return self.global_batch // (self.micro_batch * self.layout.data)

    @property
    def batches_to_come(self) -> set[int]:
        """Global batch sizes: those of the job's schedule from now on if it is kept, and `global_batch`."""
        steps = sizes_to_come(self.job, self.job.consumed_train_samples or 0) if self.keeps_global_batch else []
        return {self.global_batch, *(step.size for step in steps)}

    @property
    def keeps_global_batch(self) -> bool:
        """True if the global batch is that of the job, as far as it is known.

        The layout has to divide every step of a schedule, too.
        """
        is_same = batch_of(self.job)[1] in (self.global_batch, None)
        return is_same and batch_divisor(self.job) % (self.micro_batch * self.layout.data) == 0

    @property
    def keeps_batch(self) -> bool:
        """True if both batch sizes are those of the job, as far as they are known."""
        return self.keeps_global_batch and self.micro_batch == batch_of(self.job)[0]

    @property
    def microbatch_group(self) -> int:
        """Micro batches that a virtual stage runs in turn.

        Source: `ModelParallelConfig.__post_init__`: by default the pipeline size, core_v0.9.0 to 0.19.2.
        """
        return number_of(self.job, "microbatch_group_size_per_vp_stage", 0) or self.layout.pipeline

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that share the optimizer state of parameters outside experts.

        With `--num-distributed-optimizer-instances` they are a part of the data-parallel ranks.
        """
        return max(self.layout.data * self.layout.context // self.instances, 1)

    @property
    def expert_optimizer_ranks(self) -> int:
        """Ranks that share the optimizer state of experts."""
        return max(self.layout.expert_data // self.instances, 1)

    @property
    def instances(self) -> int:
        """Number of instances of the distributed optimizer."""
        return self.job.num_distributed_optimizer_instances or 1

    @property
    def has_sequence_parallelism(self) -> bool:
        """True if activations are also divided along the sequence.

        The job's flag is kept. To train experts under tensor parallelism it is required (`MoELayer.forward`,
        megatron/core/transformer/moe/moe_layer.py). `validate_args` disables it without tensor parallelism.
        """
        is_needed = bool(self.job.raw.get("sequence_parallel")) or bool(self.job.num_experts)
        return self.layout.tensor > 1 and is_needed
