"""Wraps `load_checkpoint` of `megatron/training/checkpointing.py` to resume under another layout.

Tested with core_v0.16.1, 0.19.0 and 0.19.2. If stock Megatron can load the checkpoint, it gets its arguments unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agree
from mcore_ckpt_ext.continuity.mathematics import comparison_of_jobs
from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import OVERRIDES_BOUNDS_OF_GROUPS
from mcore_ckpt_ext.layout.master_check import MasterCheck
from mcore_ckpt_ext.megatron.check_after_load import PROVEN, WriteDetector, prove_loaded, repair_shifted
from mcore_ckpt_ext.megatron.cyclic_sampler import keep_history
from mcore_ckpt_ext.megatron.decision_phases import ASSESSMENT
from mcore_ckpt_ext.megatron.energon_states import provide_states
from mcore_ckpt_ext.megatron.fast_load import reading_fast
from mcore_ckpt_ext.megatron.fsdp_load import (
    advise_torch_fsdp,
    is_of_fsdp,
    is_of_torch_fsdp,
    load_into_fsdp,
    load_into_torch_fsdp,
)
from mcore_ckpt_ext.megatron.huggingface_start import start_from
from mcore_ckpt_ext.megatron.live.job_ranks import perform
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.live.param_groups import takes_own_bounds
from mcore_ckpt_ext.megatron.live.phases import Phase
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_assessment import (
    LoadAssessment,
    explain,
    lacks_random_states,
    refuse_another_kind,
)
from mcore_ckpt_ext.megatron.load_phases import CHECKING, COMPLETENESS, DECIDING, LOOKING, RESUMING, MegatronResume
from mcore_ckpt_ext.megatron.load_session import LoadSession, running_load
from mcore_ckpt_ext.megatron.megatron_rank import MegatronRank
from mcore_ckpt_ext.megatron.new_tokens import initialization_kept, keeps_initialization, kept_message
from mcore_ckpt_ext.megatron.probe import resuming_from_complete
from mcore_ckpt_ext.megatron.random_seed import seed_again
from mcore_ckpt_ext.megatron.random_states import grid_may_differ
from mcore_ckpt_ext.megatron.run_folder import detects_format, folder_to_load, run_folder, with_detected_format
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.shared_index import share_index
from mcore_ckpt_ext.megatron.weights_load import load_weights_alone
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import overridden, scope_of
from mcore_ckpt_ext.patching.patch_point import Function
from mcore_ckpt_ext.patching.reentrancy import reentrancy_guard
from mcore_ckpt_ext.settings import ACCEPT_LOST, AUTO, FAST, LOAD, READ_ONCE, VERIFY_ALL
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE

_ANEW = "random state is reinitialized"


def wrap_load_checkpoint(original: Function) -> Function:
    """Wrap `load_checkpoint`: fill the optimizer if stock would refuse or load other parameters' state."""

    def load(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *positional: Any, **keywords: Any) -> Any:
        return _LoadCall(original, ddp_model, optimizer, opt_param_scheduler, positional, keywords).run()

    @functools.wraps(original)
    def load_checkpoint(*positional: Any, **keywords: Any) -> Any:
        # --moe-use-upcycling still passes the model under its name up to 0.8.0, and stock Megatron then fails with a
        # TypeError (`setup_model_and_optimizer`, megatron/training/training.py, core_v0.12.1 to 0.19.2).
        if "model" in keywords:
            keywords["ddp_model"] = keywords.pop("model")
        return load(*positional, **keywords)

    return load_checkpoint


class _LoadCall:
    """One call of `load_checkpoint`."""

    def __init__(
        self,
        original: Function,
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> None:
        bound = inspect.signature(original).bind(ddp_model, optimizer, opt_param_scheduler, *positional, **keywords)
        bound.apply_defaults()
        self._given = bound.arguments
        self._scope = scope = scope_of(original)
        self._arguments = arguments = scope["get_args"]()
        self._chunks = scope["unwrap_model"](ddp_model)
        self._optimizer = optimizer
        self._call = functools.partial(original, ddp_model, optimizer, opt_param_scheduler, *positional, **keywords)
        directory, self._finetunes = run_folder(scope, arguments, bound.arguments["load_arg"])
        self._resume = MegatronResume(
            LoadSession(Path(str(directory))),
            JobArguments.of(vars(arguments)),
            _options(arguments),
            arguments=arguments,
            load_arg=bound.arguments["load_arg"],
            directory=directory,
            takes_optimizer=_takes_optimizer(arguments, optimizer),
            is_sharded=is_of_fsdp(arguments) or is_of_torch_fsdp(arguments),
            scheduler=opt_param_scheduler,
            version=megatron_version(),
        )
        without_optimizer = functools.partial(original, ddp_model, None, None, *positional, **keywords)
        self._rank = MegatronRank(scope, self._given, self._chunks, optimizer, without_optimizer)
        self._read_lines: list[str] = []
        self._summary = ""
        self._unrestored = ""
        self._has_filled = False

    def run(self) -> Any:
        """Load the checkpoint and return the result of the original function."""
        detector = WriteDetector(self._chunks)
        perform(LOOKING, self._resume, self._rank)
        probe = self._resume.probe
        permitted = None
        if probe.model is not None:
            result = start_from(self._scope, probe.model, self._chunks, self._optimizer, self._call)
        else:
            if self._finetunes:
                self._arguments.finetune = True  # Megatron sets it, too, once it has found the folder
                self._resume.takes_optimizer = False
            perform([COMPLETENESS], self._resume, self._rank)
            complete = resuming_from_complete(self._scope, probe.health)
            session = running_load(lambda: self._resume.session)
            detected = with_detected_format(self._resume.directory, self._arguments)
            with reentrancy_guard(), complete, session, detected, share_index(self._resume.session.index):
                result, permitted = self._dispatch()
        # Megatron-FSDP derives its weights from its masters, so there is nothing to compare.
        proven = False
        if self._optimizer is not None and not is_of_fsdp(self._arguments):
            proven = prove_loaded(self._chunks, self._optimizer, detector.detects_load(self._chunks), permitted)
        self._continue_data()
        if not self._has_filled:
            seeded = self._seed_again(result, lacking=bool(self._unrestored))
            random_states = seeded or self._unrestored or (_ANEW if self._summary else "")
            read = [f"{LOAD.flag}: {self._read_lines[-1]}", PROVEN if proven else ""] if self._read_lines else []
            if line := "; ".join(filter(None, [*read, self._summary, random_states])):
                announce(line, each_time=bool(random_states))
        return result

    def _seed_again(self, result: Any, *, lacking: bool) -> str:
        """Seed random states that the checkpoint lacks, at least those of ranks that it did not have.

        Args:
            result: what Megatron's load returned.
            lacking: whether none could be loaded.

        Returns:
            What the summary says of it; empty if nothing was seeded.
        """
        if not (lacking or self._resume.changes_grid) or not seed_again(self._arguments, iteration := result[0]):
            return ""
        return f"{_ANEW} from --seed and iteration {iteration}"

    def _continue_data(self) -> None:
        """Continue the data in its order, and log where that fails, unless a summary has."""
        data = self._resume.data
        keep_history(self._resume.data_layouts, self._arguments)
        if self._resume.loader_states is not None:
            provide_states(self._scope, self._arguments, self._resume.loader_states)
        if self._has_filled:
            return
        if data is not None and data.is_remarkable:
            announce(data.sentence)
        if self._resume.release:
            announce(self._resume.release)

    def _dispatch(self) -> tuple[Any, MasterCheck | None]:
        """Load by the loop's own route.

        Returns:
            The result of the original, and the checkpoint's comparison of masters and weights if this package filled
            the optimizer, else None.
        """
        scope = self._scope
        arguments = self._arguments
        directory = self._resume.directory
        perform(CHECKING, self._resume, self._rank)
        if self._resume.is_sharded:
            return self._load_sharded(), None
        advise_torch_fsdp(arguments, directory)
        if _resumes_optimizer(arguments, self._optimizer):
            if (assessment := self._decide()) is not None:
                if assessment.decision.is_stock:
                    return self._load_by_stock(assessment), None
                return self._fill_optimizer(assessment)
        elif self._resume.takes_optimizer:  # an optimizer or a format that only stock Megatron may support
            refuse_another_kind(scope, self._given, directory)
            return self._call_original(), None
        return self._load_weights_alone(), None

    def _load_sharded(self) -> Any:
        """Load into a model that Megatron-FSDP or torch's FSDP shards."""
        assessment = self._decide([ASSESSMENT])
        if assessment is None or assessment.decision.is_stock:
            return self._call_original()
        session = self._resume.session
        if is_of_torch_fsdp(self._arguments):
            loaded = load_into_torch_fsdp(self._scope, session, self._chunks, self._optimizer, self._call_original)
        else:
            loaded = load_into_fsdp(self._scope, session, self._call_original)
        result, self._summary = loaded
        return result

    def _decide(self, phases: Sequence[Phase] = DECIDING) -> LoadAssessment | None:
        """Decide who loads the optimizer; None if there is none that this package could fill. Collective."""
        perform(phases, self._resume, self._rank)
        if (assessment := self._resume.assessment) is not None:
            explain(assessment.decision, assessment.folder)
        return assessment

    def _call_original(self, *, is_moved: bool = False) -> Any:
        """Load by stock Megatron; by `--ckpt-ext-load`, this package may read the tensors.

        Only a read that the user chose is logged.

        Args:
            is_moved: the layout changed, so that this package reads unless the user chose stock Megatron.
        """
        choice = LOAD.choose(self._arguments)
        if choice != FAST and not (choice == AUTO and is_moved):
            return self._call()
        with reading_fast(self._resume.session, read_once=READ_ONCE.choose(self._arguments)) as lines:
            result = self._call()
        if choice == FAST:
            self._read_lines.extend(lines)
        return result

    def _load_by_stock(self, assessment: LoadAssessment) -> Any:
        """Load an optimizer by stock Megatron."""
        with self._skip_random_states(assessment.decision.omits_random_states):
            result = self._call_original(is_moved=assessment.decision.is_moved)
        if assessment.rounding:
            announce(assessment.rounding)
        if assessment.may_be_shifted:
            repair_shifted(self._resume.session, self._chunks, self._optimizer, self._arguments)
        return result

    @contextmanager
    def _skip_random_states(self, lacking: bool) -> Iterator[None]:
        """Load by stock Megatron within this scope, without random states if it would request absent ones."""
        if not lacking or self._arguments.no_load_rng:
            yield
            return
        with overridden(vars(self._arguments), no_load_rng=True):
            yield
        self._unrestored = f"{_ANEW}: the checkpoint lacks some random states that this job requests"

    def _load_weights_alone(self) -> Any:
        """Load without the optimizer; new tokens keep their rows if the user accepts them."""
        arguments = self._arguments
        resume = self._resume
        folder = folder_to_load(resume.directory, arguments)

        def lacks() -> bool:
            if folder is None or arguments.finetune or not (folder / METADATA_FILE).is_file():
                return False
            return folder.name != RELEASE and lacks_random_states(resume.session.with_folder(folder), arguments)

        lacking = agree("looking at the random states", lacks)[0] if grid_may_differ(arguments) else False
        kept = resume.tokens if keeps_initialization() else range(0)
        with initialization_kept(self._chunks, kept, self._optimizer), self._skip_random_states(lacking):
            loaded = load_weights_alone(
                self._scope, resume.session, resume.directory, self._chunks, self._call_original
            )
        if kept:
            announce(kept_message(kept))
        result, self._summary = loaded
        return result

    def _fill_optimizer(self, assessment: LoadAssessment) -> tuple[Any, MasterCheck]:
        """Plan the optimizer's state, let Megatron load the weights, then verify and fill the optimizer."""
        resume = self._resume
        rank = self._rank
        perform(RESUMING, resume, rank)
        if resume.scheduler is not None:
            self._load_schedule(resume.schedule, follows_samples=resume.options.own_bounds)
        grown = f"{kept_message(resume.tokens)}, with moments of zero" if resume.tokens else ""
        lacking = rank.starts_random_states
        reason = ": --no-load-rng" if self._arguments.no_load_rng else ", as in stock Megatron on a changed layout"
        random_states = self._seed_again(rank.result, lacking=lacking) or (f"{_ANEW}{reason}" if lacking else "")
        data = resume.data.sentence if resume.data is not None else ""
        training = comparison_of_jobs(resume.checkpoint.job.arguments(), resume.running, megatron_version())
        self._has_filled = True
        parts = [str(rank.summary), assessment.rounding, grown, random_states, data, training]
        announce("; ".join(filter(None, parts)), each_time=True)
        return rank.result, rank.master_check(resume.checkpoint)

    def _load_schedule(self, schedule: Mapping[str, Any] | None, *, follows_samples: bool) -> None:
        """Load the scheduler, and let it set the learning rate and weight decay of every parameter group.

        Stock's `load_state_dict` sets them before it takes the weight decay of the checkpoint, so that the next step
        would still use the command line's (megatron/core/optimizer_param_scheduler.py, core_v0.7.0 to 0.19.2). With
        --override-opt_param-scheduler, 0.20 continues at the number of consumed samples (`load_checkpoint`): the
        scheduler has counted fewer if steps were skipped, as in fp16, or if it was once reset.
        """
        scheduler = self._resume.scheduler
        scheduler.load_state_dict(schedule)
        samples = self._arguments.consumed_train_samples
        overrides = follows_samples and OVERRIDES_BOUNDS_OF_GROUPS.is_of(megatron_version())
        if overrides and scheduler.num_steps != samples:
            announce(
                f"the scheduler continues at {quantity(samples, 'consumed sample')}, as in Megatron with "
                f"--override-opt_param-scheduler; it had counted {scheduler.num_steps}"
            )
            scheduler.num_steps = samples
        scheduler.step(increment=0)


def _options(arguments: Any) -> ResumeOptions:
    """Return the options of a resume by the settings of this package."""
    return ResumeOptions(
        verify_all=VERIFY_ALL.value,
        accept_lost=ACCEPT_LOST.value,
        read_once=READ_ONCE.choose(arguments),
        own_bounds=takes_own_bounds(vars(arguments), megatron_version()),
    )


def _resumes_optimizer(arguments: Any, optimizer: Any) -> bool:
    """Return True if this package may have to fill the optimizer from a checkpoint that it can read."""
    if not _takes_optimizer(arguments, optimizer):
        return False
    chain = Chain.of(optimizer)
    if chain.unknown or not (chain.whole or arguments.use_distributed_optimizer):
        return False
    return arguments.ckpt_format in (TORCH_DIST, LEGACY) or detects_format(arguments)


def _takes_optimizer(arguments: Any, optimizer: Any) -> bool:
    """Return True if a load includes the state of an optimizer."""
    return optimizer is not None and not arguments.no_load_optim and not arguments.finetune
