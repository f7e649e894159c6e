"""Wraps `load_checkpoint` of `megatron/training/checkpointing.py` to resume under another layout.

Tested with core_v0.16.1, 0.19.0 and 0.19.2. If stock Megatron can load the checkpoint, it gets its arguments unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import agreed
from mcore_ckpt_ext.continuity.mathematics import differences, sentence_of
from mcore_ckpt_ext.continuity.sizes import sizes_of_job
from mcore_ckpt_ext.errors import counted
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import OVERRIDES_BOUNDS_OF_GROUPS
from mcore_ckpt_ext.layout.master_check import Proof
from mcore_ckpt_ext.megatron.check_after_load import PROVEN, WriteDetector, prove_loaded, repair_shifted
from mcore_ckpt_ext.megatron.cyclic_sampler import keep_history
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
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_decision import (
    LoadAssessment,
    explain,
    lacks_random_states,
    refuse_another_kind,
    with_order_compared,
)
from mcore_ckpt_ext.megatron.load_phases import CHECKING, DECIDING, LOOKING, RESUMING, MegatronLoad
from mcore_ckpt_ext.megatron.load_session import LoadSession, running_load
from mcore_ckpt_ext.megatron.megatron_rank import MegatronRank
from mcore_ckpt_ext.megatron.new_tokens import initialization_kept, keeps_initialization, kept_message
from mcore_ckpt_ext.megatron.probe import resuming_from_complete
from mcore_ckpt_ext.megatron.random_seed import seed_again
from mcore_ckpt_ext.megatron.random_states import may_differ
from mcore_ckpt_ext.megatron.run_folder import folder_named, run_folder
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.shared_index import index_shared
from mcore_ckpt_ext.megatron.weights_load import load_weights_alone
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.patching.reentrancy import reentrancy_guard
from mcore_ckpt_ext.settings import ACCEPT_LOST, AUTO, FAST, LOAD, READ_ONCE, VERIFY_ALL
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE

Function = Callable[..., Any]
_ANEW = "random state is reinitialized"


def wrap_load_checkpoint(original: Function) -> Function:
    """Wrap `load_checkpoint`: fill the optimizer if stock would refuse or load other parameters' state."""

    def load(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *positional: Any, **keywords: Any) -> Any:
        return _Load(original, ddp_model, optimizer, opt_param_scheduler, positional, keywords).run()

    @functools.wraps(original)
    def load_checkpoint(*positional: Any, **keywords: Any) -> Any:
        # --moe-use-upcycling still passes the model under its name up to 0.8.0, and stock Megatron then fails with a
        # TypeError (`setup_model_and_optimizer`, megatron/training/training.py, core_v0.12.1 to 0.19.2).
        if "model" in keywords:
            keywords["ddp_model"] = keywords.pop("model")
        return load(*positional, **keywords)

    return load_checkpoint


class _Load:
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
        call = inspect.signature(original).bind(ddp_model, optimizer, opt_param_scheduler, *positional, **keywords)
        call.apply_defaults()
        self._given = call.arguments
        self._scope = scope = _scope(original)
        self._arguments = arguments = scope["get_args"]()
        self._chunks = scope["unwrap_model"](ddp_model)
        self._optimizer = optimizer
        self._original = functools.partial(original, ddp_model)
        self._rest = functools.partial(self._original, optimizer, opt_param_scheduler, *positional, **keywords)
        directory, self._finetunes = run_folder(scope, arguments, call.arguments["load_arg"])
        self._load = MegatronLoad(
            LoadSession(Path(str(directory))),
            JobArguments.of(vars(arguments)),
            _options(arguments),
            arguments=arguments,
            load_arg=call.arguments["load_arg"],
            directory=directory,
            takes_optimizer=_takes_optimizer(arguments, optimizer),
            is_sharded=is_of_fsdp(arguments) or is_of_torch_fsdp(arguments),
            scheduler=opt_param_scheduler,
        )
        without_optimizer = functools.partial(self._original, None, None, *positional, **keywords)
        self._rank = MegatronRank(scope, self._given, self._chunks, optimizer, without_optimizer)
        self._read_lines: list[str] = []
        self._summary = self._unrestored = ""
        self._summarized = False

    def run(self) -> Any:
        """Load the checkpoint and return the result of the original function."""
        detector = WriteDetector(self._chunks)
        perform(LOOKING, self._load, self._rank)
        probe = self._load.probe
        weaker = None
        if probe.model is not None:
            result = start_from(self._scope, probe.model, self._chunks, self._optimizer, self._rest)
        else:
            if self._finetunes:
                self._arguments.finetune = True  # Megatron sets it, too, once it has found the folder
                self._load.takes_optimizer = False
            perform(CHECKING[:1], self._load, self._rank)
            complete = resuming_from_complete(self._scope, probe.health)
            session = running_load(lambda: self._load.session)
            with reentrancy_guard(), complete, session, index_shared(self._load.session.index):
                result, weaker = self._dispatch()
        # Megatron-FSDP derives its weights from its masters, so there is nothing to compare.
        proven = False
        if self._optimizer is not None and not is_of_fsdp(self._arguments):
            proven = prove_loaded(self._chunks, self._optimizer, detector.detects_load(self._chunks), weaker)
        self._account_data()
        if not self._summarized:
            random_states = self._seed_again(result) or self._unrestored or (_ANEW if self._summary else "")
            read = [f"{LOAD.flag}: {self._read_lines[-1]}", PROVEN if proven else ""] if self._read_lines else []
            if line := "; ".join(filter(None, [*read, self._summary, random_states])):
                announce(line, each_time=bool(random_states))
        return result

    def _seed_again(self, result: Any) -> str:
        """Seed random states that the checkpoint lacks.

        Returns:
            What the summary says of it; empty if nothing was seeded.
        """
        if not self._load.changes_grid or not seed_again(self._arguments, iteration := result[0]):
            return ""
        return f"{_ANEW} from --seed and iteration {iteration}"

    def _mathematics(self) -> str:
        """Return what the job computes otherwise than the one that saved, for the summary."""
        written = self._load.checkpoint.job.arguments()
        old, new = map(sizes_of_job, (written, self._load.running))
        if not written.is_complete or old == new:
            return ""
        return sentence_of(differences(self._load.running, old, new, megatron_version()))

    def _account_data(self) -> None:
        """Let the data go on in its order, and log where it does not, unless the summary has."""
        data = self._load.data
        keep_history(self._load.data_layouts, self._arguments)
        if self._load.loader_states is not None:
            provide_states(self._scope, self._arguments, self._load.loader_states)
        if data is not None and data.is_remarkable and not self._summarized:
            announce(data.sentence)

    def _dispatch(self) -> tuple[Any, Proof | None]:
        """Load by the loop's own route.

        Returns:
            The result of the original, and the checkpoint's comparison of masters and weights if this package filled
            the optimizer, else None.
        """
        scope = self._scope
        arguments = self._arguments
        directory = self._load.directory
        perform(CHECKING[1:], self._load, self._rank)
        if is_of_fsdp(arguments):
            result, self._summary = load_into_fsdp(scope, self._load.session, directory, self._load_by_stock)
            return result, None
        if is_of_torch_fsdp(arguments):
            session = self._load.session
            loaded = load_into_torch_fsdp(scope, session, directory, self._chunks, self._optimizer, self._load_by_stock)
            result, self._summary = loaded
            return result, None
        advise_torch_fsdp(arguments, directory)
        if _resumes_optimizer(scope, self._optimizer):
            if (assessment := self._decide()) is not None:
                return (self._load_stock(assessment), None) if assessment.decision.is_stock else self._resume()
        elif self._load.takes_optimizer:
            refuse_another_kind(scope, self._given, directory)
            return self._load_by_stock(), None
        with self._initialization_kept(self._load.tokens):
            return self._weights_alone(), None

    def _decide(self) -> LoadAssessment | None:
        """Decide who loads the optimizer; None if there is none that this package could fill. Collective."""
        load = self._load
        perform(DECIDING, load, self._rank)
        assessment = load.assessment
        if assessment is None:
            return None
        load.session = load.session.with_folder(assessment.folder)
        if assessment.decision.is_stock and not assessment.is_presented:
            decision = with_order_compared(assessment.decision, load.session, lambda: self._chunks, self._optimizer)
            load.assessment = assessment = replace(assessment, decision=decision)
        explain(assessment.decision, assessment.folder)
        return assessment

    @contextmanager
    def _initialization_kept(self, tokens: range) -> Iterator[None]:
        """Load weights within this scope: new tokens keep their rows if the user accepts them."""
        kept = tokens if keeps_initialization() else range(0)
        with initialization_kept(self._chunks, kept, self._optimizer):
            yield
        if kept:
            announce(kept_message(kept))

    def _load_by_stock(self) -> Any:
        """Load by stock Megatron; with `--ckpt-ext-load fast` this package reads the tensors and logs it."""
        if LOAD.chosen(self._arguments) != FAST:
            return self._rest()
        with reading_fast(self._load.session, read_once=READ_ONCE.chosen(self._arguments)) as read:
            result = self._rest()
        self._read_lines.extend(read)
        return result

    def _load_stock(self, assessment: LoadAssessment) -> Any:
        """Load an optimizer by stock Megatron; this package reads the tensors if the layout changed."""
        by_us = LOAD.chosen(self._arguments) == AUTO and assessment.decision.is_moved
        once = READ_ONCE.chosen(self._arguments)
        with (
            self._skip_random_states(assessment.decision.omits_random_states),
            reading_fast(self._load.session, read_once=once) if by_us else nullcontext(),
        ):
            result = self._load_by_stock()
        if assessment.may_be_shifted:
            repair_shifted(self._load.session, self._chunks, self._optimizer, self._arguments)
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

    def _weights_alone(self) -> Any:
        """Load without the optimizer."""
        arguments = self._arguments
        load = self._load
        folder = folder_named(load.directory, arguments)

        def lacks() -> bool:
            if folder is None or arguments.finetune or not (folder / METADATA_FILE).is_file():
                return False
            return folder.name != RELEASE and lacks_random_states(load.session.with_folder(folder), arguments)

        lacking = agreed("looking at the random states", lacks)[0] if may_differ(arguments) else False
        with self._skip_random_states(lacking):
            loaded = load_weights_alone(self._scope, load.session, load.directory, self._chunks, self._load_by_stock)
        result, self._summary = loaded
        return result

    def _resume(self) -> tuple[Any, Proof]:
        """Plan the optimizer's state, let Megatron load the weights, then verify and fill the optimizer."""
        load = self._load
        rank = self._rank
        perform(RESUMING, load, rank)
        if self._load.scheduler is not None:
            self._load_schedule(load.schedule, follows_samples=load.options.own_bounds)
        grown = f"{kept_message(load.tokens)}, with moments of zero" if load.tokens else ""
        as_stock = f"{_ANEW}, as in stock Megatron on a changed layout" if rank.starts_random_states else ""
        random_states = self._seed_again(rank.result) or as_stock
        data = load.data.sentence if load.data is not None else ""
        self._summarized = True
        parts = [str(rank.summary), grown, random_states, data, self._mathematics()]
        announce("; ".join(filter(None, parts)), each_time=True)
        return rank.result, rank.proof(load.checkpoint)

    def _load_schedule(self, schedule: Mapping[str, Any] | None, *, follows_samples: bool) -> None:
        """Load the scheduler, and let it set the learning rate and weight decay of every parameter group.

        Stock's `load_state_dict` sets them before it takes the weight decay of the checkpoint, so that the next step
        would still use the command line's (megatron/core/optimizer_param_scheduler.py, core_v0.7.0 to 0.19.2). With
        --override-opt_param-scheduler, 0.20 continues at the number of consumed samples (`load_checkpoint`): the
        scheduler has counted fewer if steps were skipped, as in fp16, or if it was once reset.
        """
        scheduler = self._load.scheduler
        scheduler.load_state_dict(schedule)
        samples = self._arguments.consumed_train_samples
        overrides = follows_samples and OVERRIDES_BOUNDS_OF_GROUPS.is_of(megatron_version())
        if overrides and scheduler.num_steps != samples:
            announce(
                f"the scheduler continues at {counted(samples, 'consumed sample')}, as in Megatron with "
                f"--override-opt_param-scheduler; it had counted {scheduler.num_steps}"
            )
            scheduler.num_steps = samples
        scheduler.step(increment=0)


def _options(arguments: Any) -> ResumeOptions:
    """Return the options of a resume by the settings of this package."""
    return ResumeOptions(
        verify_all=VERIFY_ALL.value,
        accept_lost=ACCEPT_LOST.value,
        read_once=READ_ONCE.chosen(arguments),
        own_bounds=takes_own_bounds(vars(arguments), megatron_version()),
    )


def _scope(original: Function) -> Scope:
    """Return the globals of Megatron's checkpointing module, beneath other wrappers of its functions."""
    scope: Scope = inspect.unwrap(original).__globals__
    return scope


def _resumes_optimizer(scope: Scope, optimizer: Any) -> bool:
    """Return True if this package may have to fill the optimizer from a checkpoint that it can read."""
    arguments = scope["get_args"]()
    if not _takes_optimizer(arguments, optimizer):
        return False
    detects = getattr(arguments, "auto_detect_ckpt_format", False)
    chain = Chain.of(optimizer)
    if chain.unknown or not (chain.whole or arguments.use_distributed_optimizer):
        return False
    return arguments.ckpt_format in (TORCH_DIST, LEGACY) or detects


def _takes_optimizer(arguments: Any, optimizer: Any) -> bool:
    """Return True if a load includes the state of an optimizer."""
    return optimizer is not None and not arguments.no_load_optim and not arguments.finetune
