"""Traits of formats, by which other modules act instead of by the class of a reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.evidence import Bound, Loading

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.recognition import Fit
    from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
    from mcore_ckpt_ext.formats.view import CheckpointView


class FormatTraits:
    """The traits of most formats; a reader overrides those in which its own differs.

    Attributes:
        is_model_folder: whether it is a folder of transformers', whose layer spec is chosen when it is opened.
        loading: how Megatron's own loader takes the format.
        foreign_writer: who wrote it, where that was not Megatron.
        is_of_convert: whether only conversions of this package write it.
        is_of_job: whether a job saves it, which has a layout, and an iteration; a folder of weights alone has neither.
    """

    is_model_folder: ClassVar[bool] = False
    loading: ClassVar[Loading] = Loading()
    foreign_writer: ClassVar[str] = ""
    is_of_convert: ClassVar[bool] = False
    is_of_job: ClassVar[bool] = True

    def unbuildable(self, version: tuple[int, int]) -> str | None:
        """Why a version of Megatron has no such model; None where it has."""
        return None

    def rank_of(self, file: str) -> tuple[int, int, int] | None:
        """The model-parallel rank (tensor, pipeline, expert) that wrote a file; None where nothing shows it."""
        return None

    def evidence(self) -> Iterator[Bound]:
        """Evidence of the Megatron release that wrote the checkpoint, other than the job's arguments."""
        return iter(())

    def run_config(self) -> str | None:
        """The files that Megatron-Bridge requires for this model; None if the source is a Megatron checkpoint."""
        return None

    @property
    def not_looked_at(self) -> list[str]:
        """Tensors of what sees images that are left out."""
        return []

    @property
    def fit(self) -> Fit | None:
        """The model's family and arguments, where the format itself names them; None where it does not."""
        return None

    @property
    def other_layer_spec(self) -> str | None:
        """Another layer spec under whose names the model can be opened; None where its names are given."""
        return None

    @property
    def as_torch_dist(self) -> TorchDistCheckpoint | None:
        """The reader itself, where Megatron's loader of `torch_dist` reads the folder by the same index; or None."""
        return None

    @property
    def has_norms_of_all_heads(self) -> bool:
        """Whether norms of queries and keys are of all heads together, which Megatron Core does not have."""
        return False

    def mismatch_with(self, optimizer: CheckpointView) -> CheckpointError | None:
        """Why the weights are not those of an optimizer, as far as descriptions of the two show it.

        Args:
            optimizer: the checkpoint that holds it.

        Returns:
            The error to raise; None where nothing speaks against it.
        """
        return None

    @property
    def starts_jobs(self) -> str:
        """How a job of Megatron starts from the folder as it is; empty where it cannot, or resumes it."""
        return ""

    @property
    def conversion(self) -> str:
        """The command that writes a checkpoint which jobs can load."""
        return "mcore-ckpt convert SRC DST --to torch_dist"

    @property
    def described_by(self) -> str:
        """The name of the file that describes the job; empty where none does."""
        return ""

    @property
    def problems(self) -> Sequence[str]:
        """The values of sources of the job's arguments that are not used, and why."""
        return ()
