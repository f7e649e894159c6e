"""This rank's part of a load by Megatron's own loop: the work of the phases in `load_phases`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from mcore_ckpt_ext.megatron.fast_load import reading_fast
from mcore_ckpt_ext.megatron.fsdp_load import assess_fsdp
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.load_assessment import (
    LoadAssessment,
    assess_live,
)
from mcore_ckpt_ext.megatron.load_phases import MegatronResume
from mcore_ckpt_ext.megatron.local_checkpoints import takes_local_checkpoint
from mcore_ckpt_ext.megatron.new_tokens import initialization_kept
from mcore_ckpt_ext.megatron.presentation import may_need_presentation, reads_zarr
from mcore_ckpt_ext.megatron.probe import (
    check_all_have_the_same,
    check_all_see,
    trackers_seen,
)
from mcore_ckpt_ext.megatron.random_states import requested_grid
from mcore_ckpt_ext.megatron.run_folder import folder_to_load
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import present
from mcore_ckpt_ext.megatron.strictness import strictness
from mcore_ckpt_ext.optimizer_reshard import LiveRank
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.settings import LOAD, SETTINGS, STOCK


class MegatronRank(LiveRank):
    """This rank's part of a load by Megatron's own loop.

    Attributes:
        result: the result of the framework's function.
        starts_random_states: True if random states are reinitialized.
    """

    result: Any
    starts_random_states: bool

    def __init__(
        self,
        scope: Scope,
        call: Mapping[str, Any],
        chunks: Chunks,
        optimizer: Any,
        load_without_optimizer: Callable[[], Any],
    ) -> None:
        super().__init__(chunks, optimizer)
        self._scope = scope
        self._call = call
        self._load_without_optimizer = load_without_optimizer

    def observations(self, resume: MegatronResume) -> tuple[tuple[bool, ...], dict[str, str]]:
        """Return what must be the same on all ranks: visible tracker files, and this package's settings."""
        settings = {setting.name: str(setting.choose(resume.arguments)) for setting in SETTINGS}
        return trackers_seen(resume.arguments, resume.load_arg), settings

    def compare_observations(
        self, resume: MegatronResume, observed: Sequence[tuple[tuple[bool, ...], dict[str, str]]]
    ) -> None:
        """Refuse if the ranks differ, so that some would wait in collectives that others do not call.

        Raises:
            ResumeRefusedError: on every rank.
        """
        check_all_see([seen for seen, _ in observed], resume.arguments, resume.load_arg)
        check_all_have_the_same([settings for _, settings in observed])

    def takes_local_checkpoint(self, resume: MegatronResume) -> bool:
        """Return True if the load takes a local checkpoint, once its layout is that of the job.

        Raises:
            ResumeRefusedError: it has another layout.
        """
        return takes_local_checkpoint(self._scope, self._call, resume.directory)

    def needs_presentation(self, resume: MegatronResume) -> bool:
        """Return True if this package has to present the checkpoint to Megatron."""
        folder = folder_to_load(resume.directory, resume.arguments)
        if folder is None:
            return False
        resume.session = resume.session.with_folder(folder)
        return may_need_presentation(resume.session, resume.arguments, megatron_version(), reads_zarr=reads_zarr)

    def assess(self, resume: MegatronResume) -> LoadAssessment | None:
        """Assess the checkpoint for the live optimizer."""
        if resume.is_sharded:
            return assess_fsdp(resume.session, resume.directory, resume.arguments, self._optimizer)
        if resume.is_local:
            return None
        return assess_live(
            self._scope,
            self._call,
            resume.session,
            resume.directory,
            is_presented=resume.is_presented,
            has_new_tokens=bool(resume.tokens),
        )

    def load_weights(self, resume: MegatronResume) -> None:
        """Let Megatron load everything but the optimizer."""
        assessment = resume.assessment
        arguments = resume.arguments
        checkpoint = resume.checkpoint
        is_presented = resume.is_presented
        grid = requested_grid(arguments, megatron_version())
        is_lacking = assessment is not None and assessment.decision.omits_random_states
        self.starts_random_states = checkpoint.states.random_grid() != grid or is_lacking
        less = {
            "no_load_optim": True,
            "no_load_rng": self.starts_random_states or arguments.no_load_rng,
            **strictness(arguments),
        }
        is_read_by_others = is_presented or LOAD.choose(arguments) == STOCK
        with (
            overridden(vars(arguments), **less),
            present(self._scope, resume.session, self._chunks) if is_presented else nullcontext(),
            nullcontext()
            if is_read_by_others
            else reading_fast(resume.session, checkpoint, read_once=resume.options.read_once),
            initialization_kept(self._chunks, resume.tokens),
        ):
            self.result = self._load_without_optimizer()
