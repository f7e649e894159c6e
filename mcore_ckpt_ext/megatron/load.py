"""Wraps `load_checkpoint` of `megatron/training/checkpointing.py` to resume under another layout.

Tested with core_v0.16.1, 0.19.0 and 0.19.2. If stock Megatron can load the checkpoint, it gets its arguments unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from mcore_ckpt_ext.collectives import OPTIMIZER_UNCHANGED, agreed, is_first_rank
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import OVERRIDES_BOUNDS_OF_GROUPS
from mcore_ckpt_ext.layout.master_check import Proof
from mcore_ckpt_ext.megatron.check_after_load import PROVEN, WriteDetector, prove_loaded, repair_shifted
from mcore_ckpt_ext.megatron.fast_load import reading_fast
from mcore_ckpt_ext.megatron.learning_rate_schedule import check_schedule
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.live.param_groups import takes_own_bounds
from mcore_ckpt_ext.megatron.load_decision import LoadAssessment, assess_load, lacks_random_states, refuse_another_kind
from mcore_ckpt_ext.megatron.new_tokens import (
    initialization_kept,
    keeps_initialization,
    kept_message,
    new_tokens,
    refusal,
    zeros_message,
)
from mcore_ckpt_ext.megatron.probe import (
    LoadProbe,
    check_all_have_the_same,
    check_all_see,
    probe_checkpoint,
    resuming_from_complete,
    trackers_seen,
)
from mcore_ckpt_ext.megatron.random_states import may_differ, requested_grid
from mcore_ckpt_ext.megatron.run_folder import folder_named, run_folder
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.shared_index import index_shared
from mcore_ckpt_ext.megatron.sources.huggingface import start_from
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import load_weights_alone, presented
from mcore_ckpt_ext.megatron.sources.megatron_fsdp import is_of_fsdp, load_into_fsdp
from mcore_ckpt_ext.megatron.sources.torch_fsdp import advise_torch_fsdp, is_of_torch_fsdp, load_into_torch_fsdp
from mcore_ckpt_ext.optimizer_reshard import prepare
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.patching.reentrancy import reentrancy_guard
from mcore_ckpt_ext.settings import ACCEPT_LOST, AUTO, FAST, LOAD, READ_ONCE, SETTINGS, STOCK, VERIFY_ALL
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE

Function = Callable[..., Any]
_ANEW = "random state is reinitialized"


def wrap_load_checkpoint(original: Function) -> Function:
    """Wrap `load_checkpoint`: fill the optimizer if stock would refuse or load other parameters' state."""

    def load(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *positional: Any, **keywords: Any) -> Any:
        return _Load(original, ddp_model, optimizer, opt_param_scheduler, positional, keywords).done()

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
        self._original = functools.partial(original, ddp_model)
        self._optimizer, self._scheduler, self._positional, self._keywords = (
            optimizer, opt_param_scheduler, positional, keywords
        )  # fmt: skip
        self._scope = _scope(original)
        self._chunks = self._scope["unwrap_model"](ddp_model)
        self._arguments = self._scope["get_args"]()
        self._load_arg = call.arguments["load_arg"]
        self._directory, self._finetunes = run_folder(self._scope, self._arguments, self._load_arg)
        self._read_lines: list[str] = []
        self._new_tokens = range(0)

    def done(self) -> Any:
        """Load the checkpoint and return the result of the original function."""
        detector, probed = (
            WriteDetector(self._chunks),
            _probe_on_all_ranks(self._arguments, self._load_arg, self._directory),
        )
        if probed.model is not None:
            result, weaker = (
                start_from(self._scope, probed.model, self._chunks, self._optimizer, self._by_megatron),
                None,
            )
        else:
            if self._finetunes:
                self._arguments.finetune = True  # Megatron sets it, too, once it has found the folder
            self._new_tokens = new_tokens(probed.vocabulary_rows, self._arguments)
            complete = resuming_from_complete(self._scope, self._directory, probed.health)
            with reentrancy_guard(), complete, index_shared(probed.index):
                result, weaker = self._dispatch()
        # Megatron-FSDP derives its weights from its masters, so there is nothing to compare.
        proven = False
        if self._optimizer is not None and not is_of_fsdp(self._arguments):
            proven = prove_loaded(self._chunks, self._optimizer, detector.detects_load(self._chunks), weaker)
        if self._read_lines:
            announce(f"{LOAD.flag}: {self._read_lines[-1]}{f'; {PROVEN}' if proven else ''}")
        return result

    def _dispatch(self) -> tuple[Any, Proof | None]:
        """Load by the loop's own route.

        Returns:
            The result of the original, and the checkpoint's comparison of masters and weights if this package filled
            the optimizer, else None.
        """
        scope, arguments, chunks, directory = self._scope, self._arguments, self._chunks, self._directory
        self._accept_new_tokens(self._new_tokens)
        if is_of_fsdp(arguments):
            return load_into_fsdp(scope, directory, self._by_stock), None
        if is_of_torch_fsdp(arguments):
            return load_into_torch_fsdp(scope, directory, chunks, self._optimizer, self._by_stock), None
        advise_torch_fsdp(arguments, directory)
        if _resumes_optimizer(scope, self._optimizer):
            assessment = assess_load(scope, self._given, directory, has_new_tokens=bool(self._new_tokens))
            if assessment is not None:
                return (
                    (self._load_stock(assessment), None) if assessment.decision.is_stock else self._resumed(assessment)
                )
        elif _takes_optimizer(arguments, self._optimizer):
            refuse_another_kind(scope, self._given, directory)
            return self._by_stock(), None
        with self._initialization_kept(self._new_tokens):
            return self._weights_alone(), None

    def _accept_new_tokens(self, tokens: range) -> None:
        """Accept tokens without a row in the checkpoint, if the user allows it or stock would say nothing.

        Raises:
            ResumeRefusedError: an optimizer is to be resumed, and the user does not allow it.
        """
        arguments = self._arguments
        is_sharded = is_of_fsdp(arguments) or is_of_torch_fsdp(arguments)
        if not tokens or (keeps_initialization() and not is_sharded):
            return
        if _takes_optimizer(arguments, self._optimizer):
            raise refusal(tokens, str(self._directory), can_be_kept=not is_sharded)
        announce(zeros_message(tokens))

    @contextmanager
    def _initialization_kept(self, tokens: range) -> Iterator[None]:
        """Load weights within this scope: new tokens keep their rows if the user accepts them."""
        kept = tokens if keeps_initialization() else range(0)
        with initialization_kept(self._chunks, kept, self._optimizer):
            yield
        if kept:
            announce(kept_message(kept))

    def _by_megatron(self) -> Any:
        return self._original(self._optimizer, self._scheduler, *self._positional, **self._keywords)

    def _by_stock(self) -> Any:
        """Load by stock Megatron; with `--ckpt-ext-load fast` this package reads the tensors and logs it."""
        if LOAD.chosen(self._arguments) != FAST:
            return self._by_megatron()
        with reading_fast(read_once=READ_ONCE.chosen(self._arguments)) as read:
            result = self._by_megatron()
        self._read_lines.extend(read)
        return result

    def _load_stock(self, assessment: LoadAssessment) -> Any:
        """Load an optimizer by stock Megatron; this package reads the tensors if the layout changed."""
        by_us = LOAD.chosen(self._arguments) == AUTO and assessment.decision.is_moved
        with (
            self._without_random_states(assessment.decision.omits_random_states),
            reading_fast(read_once=READ_ONCE.chosen(self._arguments)) if by_us else nullcontext(),
        ):
            result = self._by_stock()
        if assessment.may_be_shifted:
            repair_shifted(assessment.folder, self._chunks, self._optimizer, self._arguments)
        return result

    @contextmanager
    def _without_random_states(self, lacking: bool) -> Iterator[None]:
        """Load by stock Megatron within this scope, without random states if it would request absent ones."""
        if not lacking or self._arguments.no_load_rng:
            yield
            return
        with overridden(vars(self._arguments), no_load_rng=True):
            yield
        announce(f"{_ANEW}: the checkpoint lacks some random states that this job requests")

    def _weights_alone(self) -> Any:
        """Load without the optimizer."""
        arguments = self._arguments
        folder = folder_named(self._directory, arguments)

        def lacks() -> bool:
            if folder is None or arguments.finetune or not (folder / METADATA_FILE).is_file():
                return False
            return folder.name != "release" and lacks_random_states(folder, arguments)

        lacking = agreed("looking at the random states", lacks)[0] if may_differ(arguments) else False
        with self._without_random_states(lacking):
            return load_weights_alone(self._scope, self._directory, self._chunks, self._by_stock)

    def _resumed(self, assessment: LoadAssessment) -> tuple[Any, Proof]:
        """Plan the optimizer's state, let Megatron load the weights, then verify and fill the optimizer."""
        arguments, once = self._arguments, READ_ONCE.chosen(self._arguments)
        own_bounds = takes_own_bounds(vars(arguments), megatron_version())
        prepared = prepare(
            assessment.folder,
            self._chunks,
            self._optimizer,
            JobArguments.of(vars(arguments)),
            verify_all=VERIFY_ALL.value,
            accept_lost=ACCEPT_LOST.value,
            read_once=once,
            own_bounds=own_bounds,
        )
        if self._scheduler is not None and prepared.schedule is None:
            raise UnsupportedCheckpointError(
                f"the checkpoint has no state of the learning rate scheduler; {OPTIMIZER_UNCHANGED}",
                expected="lr_scheduler or opt_param_scheduler in its common state",
                where=str(assessment.folder),
                hint="another training loop wrote it: resume with --no-load-optim, or call "
                "mcore_ckpt_ext.load_optimizer in a loop of your own",
            )
        if self._scheduler is not None:
            agreed(
                "comparing the schedules", lambda: check_schedule(self._scheduler, prepared.schedule, assessment.folder)
            )
        new = new_tokens(prepared.checkpoint.vocabulary_rows, arguments)
        self._accept_new_tokens(new)
        grid = requested_grid(arguments, megatron_version())
        fresh = prepared.random_state_grid != grid or assessment.decision.omits_random_states
        source = presented(self._scope, assessment.folder, self._chunks) if assessment.is_presented else nullcontext()
        less = {"no_load_optim": True, "no_load_rng": fresh or arguments.no_load_rng, **_strictness(arguments)}
        is_read_by_others = assessment.is_presented or LOAD.chosen(arguments) == STOCK
        with (
            overridden(vars(arguments), **less),
            source,
            nullcontext() if is_read_by_others else reading_fast(prepared.checkpoint, once),
            initialization_kept(self._chunks, new),
        ):
            result = self._original(None, None, *self._positional, **self._keywords)
        summary = prepared.prove().fill()
        if self._scheduler is not None:
            self._load_schedule(prepared.schedule, follows_samples=own_bounds)
        grown = f"; {kept_message(new)}, with moments of zero" if new else ""
        announce(f"{summary}{grown}{f'; {_ANEW}, as in stock Megatron on a changed layout' if fresh else ''}")
        return result, prepared.checkpoint.proof

    def _load_schedule(self, schedule: Mapping[str, Any] | None, *, follows_samples: bool) -> None:
        """Load the scheduler, and let it set the learning rate and weight decay of every parameter group.

        Stock's `load_state_dict` sets them before it takes the weight decay of the checkpoint, so that the next step
        would still use the command line's (megatron/core/optimizer_param_scheduler.py, core_v0.7.0 to 0.19.2). With
        --override-opt_param-scheduler, 0.20 continues at the number of consumed samples (`load_checkpoint`): the
        scheduler has counted fewer if steps were skipped, as in fp16, or if it was once reset.
        """
        self._scheduler.load_state_dict(schedule)
        samples = self._arguments.consumed_train_samples
        overrides = follows_samples and OVERRIDES_BOUNDS_OF_GROUPS.is_of(megatron_version())
        if overrides and self._scheduler.num_steps != samples:
            announce(f"the scheduler continues at {samples} consumed samples, as in Megatron with "
                     f"--override-opt_param-scheduler; it had counted {self._scheduler.num_steps}")  # fmt: skip
            self._scheduler.num_steps = samples
        self._scheduler.step(increment=0)


def _probe_on_all_ranks(arguments: Any, load_arg: str, directory: str | None) -> LoadProbe:
    """Probe on rank 0 and return the result on every rank.

    Raises:
        ResumeRefusedError: on every rank, if only some ranks see a checkpoint, or if this package's settings differ
            between ranks, so that some ranks would wait in collectives that others do not call.
    """
    is_fast = LOAD.chosen(arguments) == FAST

    def assessment() -> tuple[LoadProbe | None, tuple[bool, ...], dict[str, str]]:
        seen = probe_checkpoint(arguments, load_arg, directory, shares_index=is_fast) if is_first_rank() else None
        return seen, trackers_seen(arguments, load_arg), {one.name: str(one.chosen(arguments)) for one in SETTINGS}

    probes = agreed("looking at what is to be loaded", assessment)
    check_all_see([found for _, found, _ in probes], arguments, load_arg)
    check_all_have_the_same([settings for *_, settings in probes])
    return probes[0][0] or LoadProbe()


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


def _strictness(arguments: Any) -> dict[str, str]:
    """Relax the strictness that requires a request for everything stored: the optimizer is not requested.

    Source: `StrictHandling`, megatron/core/dist_checkpointing/validation.py, core_v0.8.0 to 0.19.2. This package has
    compared the names before.
    """
    strict = "dist_ckpt_strictness"
    return {strict: "raise_unexpected"} if getattr(arguments, strict, None) == "raise_all" else {}
