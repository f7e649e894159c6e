"""Traits of formats, which other modules use in place of checks for a reader's class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.evidence import Bound, Loading
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.recognition import Fit


class FormatTraits:
    """The default traits of a format; readers override them.

    Attributes:
        is_model_folder: whether it is a transformers folder, whose layer spec is chosen on opening.
        loading: how Megatron's own loader handles the format.
        foreign_writer: the software that wrote it, if not Megatron.
        is_of_convert: whether it is written only by conversions of this package.
        is_loaded_as_stored: whether Megatron's own loop loads it without being given it as another format.
        is_of_one_layout: whether conversions write it for one parallel layout.
        is_of_job: whether a job saves it, with a layout and an iteration; False for folders of weights alone.
        index: the arrays and objects by Megatron's keys; None if the format has no index.
    """

    is_model_folder: ClassVar[bool] = False
    loading: ClassVar[Loading] = Loading()
    foreign_writer: ClassVar[str] = ""
    is_of_convert: ClassVar[bool] = False
    is_loaded_as_stored: ClassVar[bool] = False
    is_of_one_layout: ClassVar[bool] = False
    is_of_job: ClassVar[bool] = True
    index: DcpIndex | None = None

    @property
    def stored_index(self) -> DcpIndex | None:
        """The index by its stored keys; None if the format has none."""
        return self.index

    def unbuildable(self, version: tuple[int, int]) -> str | None:
        """Return why a version of Megatron cannot build this model; None if it can."""
        return None

    def rank_of(self, file: str) -> tuple[int, int, int] | None:
        """Return the model-parallel rank (tensor, pipeline, expert) that wrote a file; None if it is unknown."""
        return None

    def evidence(self) -> Iterator[Bound]:
        """Yield evidence of the Megatron release that wrote the checkpoint, other than the job's arguments."""
        return iter(())

    def run_config(self) -> str | None:
        """Return the content of `run_config.yaml` for Megatron-Bridge; None for a Megatron checkpoint."""
        return None

    def bridge_notices(self) -> list[str]:
        """Return notices for users of that content."""
        return []

    @property
    def fit(self) -> Fit | None:
        """The model's family and arguments if the format itself determines them, else None."""
        return None

    @property
    def other_layer_spec(self) -> str | None:
        """Another layer spec whose names the model can be opened with; None if its names are fixed."""
        return None

    @property
    def has_norms_of_all_heads(self) -> bool:
        """Return whether query and key norms extend over all heads, which Megatron Core does not support."""
        return False

    def mismatch_with(self, job: JobArguments) -> CheckpointError | None:
        """Check by metadata that the weights belong to an optimizer.

        Args:
            job: the arguments of the job that wrote the optimizer.

        Returns:
            The error to raise; None if nothing contradicts it.
        """
        return None

    @property
    def starts_jobs(self) -> str:
        """Return how Megatron starts a new job from the folder; empty if it cannot or resumes the old one."""
        return ""

    @property
    def conversion(self) -> str:
        """Return the command that converts the folder to a checkpoint that jobs can load."""
        return "mcore-ckpt convert SRC DST --to torch_dist"

    @property
    def described_by(self) -> str:
        """The name of the file that describes the job; empty if there is none."""
        return ""

    @property
    def problems(self) -> Sequence[str]:
        """Values of job descriptions that are ignored, and why."""
        return ()
