"""Describes the job of a checkpoint without Megatron's arguments.

The sources are auxiliary files, the checkpoint's index and the user's options. The ranks themselves wrote the index, so
it takes precedence; a source that contradicts it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import ContentError, UsageError, shorten
from mcore_ckpt_ext.job.dimensions import SIZE_ARGUMENTS
from mcore_ckpt_ext.job.facts import Facts
from mcore_ckpt_ext.job.job_arguments import PARTIAL, JobArguments
from mcore_ckpt_ext.job.loops import bridge, nemo, swift, verl
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.storage.budget import OverBudgetError
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import parse_json
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.storage.yaml_text import MOST_BYTES, parse_yaml
from mcore_ckpt_ext.versions import parse_version

ARGUMENTS = "args"
"""The key of Megatron's arguments in a common state."""
COMPARED_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "num_experts")
"""Sizes of a model that two descriptions of it must agree on."""
_COMPARED = (*SIZE_ARGUMENTS.values(), *COMPARED_SIZES)


@dataclass(frozen=True)
class Description:
    """The known properties of a job.

    Attributes:
        arguments: the job's arguments, as far as they are known.
        source: the name of the main file; empty if there is none.
        problems: values that are ignored, and why.
    """

    arguments: JobArguments
    source: str = ""
    problems: tuple[str, ...] = ()

    def with_model(self, model: Mapping[str, Any]) -> Description:
        """Add arguments of the model from another source; existing ones take precedence."""
        return replace(self, arguments=self.arguments.replace(**{**model, **self.arguments.raw}))

    def with_problem(self, problem: str) -> Description:
        """Add a value that is ignored, and why."""
        return replace(self, problems=(*self.problems, problem))


def stored_arguments(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's parsed arguments in a common state, by name; empty if it has none."""
    return dict(vars(common[ARGUMENTS])) if ARGUMENTS in common else {}


def megatron_arguments(args: Mapping[str, Any], folder: Path, sidecar: Sidecar | None) -> JobArguments:
    """Describe a job by Megatron's own arguments in its checkpoint.

    Raises:
        UnreadableCheckpointError: an argument has an invalid value.
    """
    recorded = parse_version(sidecar.megatron) if sidecar else None
    is_complete = not args.get(PARTIAL, False) and swift.MARK not in args
    return JobArguments.of(args, source=f"the arguments in {folder}", version=recorded, is_complete=is_complete)


def describe_job(reader: FolderReader, own: JobArguments | None, sidecar: Sidecar | None, facts: Facts) -> Description:
    """Describe a job by auxiliary files and the user's options, without the index.

    Args:
        reader: reads the files of the checkpoint's folder.
        own: the incomplete arguments stored in the checkpoint.
        sidecar: the sidecar of the checkpoint.
        facts: the properties that the user passes.
    """
    folder = reader.folder
    from_file = next((candidate for looks in _READERS if (candidate := looks(folder)) is not None), None)
    description = from_file or Description(own or _partial({}, folder), "its own arguments" if own else "")
    counted, problems = _train_state(reader) if description.source == bridge.RUN_CONFIG else ({}, ())
    sizes = {} if sidecar is None else sidecar.layout
    recorded = {SIZE_ARGUMENTS[name]: size for name, size in sizes.items() if name in SIZE_ARGUMENTS}
    raw_arguments = {**description.arguments.raw, **counted, **recorded, **facts.sizes()}
    ignored = (*description.problems, *problems)
    return replace(description, arguments=_partial(raw_arguments, folder, ignored), problems=ignored)


def find_contradictions(own: JobArguments, folder: Path) -> tuple[str, ...]:
    """Contradictions between an auxiliary file and Megatron's arguments, which take precedence."""
    description = next((candidate for looks in _READERS if (candidate := looks(folder)) is not None), None)
    if description is None:
        return ()
    described = {
        name: description.arguments.value(name) for name in _COMPARED if description.arguments.value(name) is not None
    }
    other = {name: value for name, value in described.items() if own.value(name) not in (value, None)}
    differences = (
        f"{description.source} has {name} {value}, but Megatron's arguments have {own.value(name)}, which is used"
        for name, value in other.items()
    )
    return (*description.problems, *differences)


def _train_state(reader: FolderReader) -> tuple[dict[str, int], tuple[str, ...]]:
    """Read the sample counters that Megatron-Bridge stores as tensors with one element."""
    if not (reader.folder / bridge.TRAIN_STATE).exists():
        return {}, ()
    try:
        archive = TorchArchive(reader, bridge.TRAIN_STATE)
        content = archive.with_values(archive.load())
        counts = {name: int(content[name]) for name in bridge.COUNTED if name in content}
    except (ContentError, TypeError, ValueError, RuntimeError) as error:
        return {}, (f"{bridge.TRAIN_STATE} is ignored: {shorten(str(error))}",)
    return {name: count for name, count in counts.items() if count >= 0}, ()


def refuse_facts(facts: Facts, where: Path) -> None:
    """Refuse properties that the user passes for a checkpoint that describes its job.

    Raises:
        UsageError: always.
    """
    name, size = next(iter(facts.sizes().items()))
    raise UsageError(
        "the checkpoint records the layout it was written under",
        found=f"{facts.option(name)} {size}",
        where=str(where),
        hint="leave the option out",
    )


def complete(description: Description, inferred: Mapping[str, Any], facts: Facts, folder: Path) -> Description:
    """Add the arguments found in the index, which take precedence.

    Args:
        description: from `describe_job`.
        inferred: arguments found in the index.
        facts: the properties that the user passes.
        folder: the folder of the checkpoint.

    Raises:
        UsageError: a property that the user passes contradicts the index.
    """
    recorded = description.arguments.raw
    contradicted = [
        name for name, value in inferred.items() if name in recorded and recorded[name] not in (value, None)
    ]
    for name in contradicted:
        if facts.sizes().get(name) == recorded[name]:
            raise UsageError(
                "the checkpoint's index contradicts the option",
                found=f"{facts.option(name)} {recorded[name]}",
                expected=f"{inferred[name]}",
                where=str(folder),
                hint="leave the option out: the index is used anyway",
            )
    source = description.source or SIDECAR_FILE
    differences = [
        f"{source} has {name} {recorded[name]}, but the index has {inferred[name]}, which is used"
        for name in contradicted
    ]
    merged = {
        **recorded,
        **{name: value for name, value in inferred.items() if value is not None or name not in recorded},
    }
    arguments = _partial(merged, folder, description.problems)
    return replace(description, arguments=arguments, problems=(*description.problems, *differences))


def _partial(raw_arguments: Mapping[str, Any], folder: Path, problems: Sequence[str] = ()) -> JobArguments:
    because = "".join(f" ({problem})" for problem in problems)
    return JobArguments.of(raw_arguments, source=f"what is known of the job of {folder}{because}", is_complete=False)


def _bridge_description(folder: Path) -> Description | None:
    return _read(folder, bridge.RUN_CONFIG, lambda text, where: bridge.job_arguments(parse_yaml(text, where), where))


def folders_of_verl(folder: Path) -> tuple[Path, ...]:
    """Return the folders in which verl may describe the job of a checkpoint; empty for other loops."""
    if folder.name != verl.DISTRIBUTED and not (folder / verl.TRANSFORMER_CONFIG).is_file():
        return ()
    return folder, folder.parent, folder.parent.parent


def _verl_description(folder: Path) -> Description | None:
    for step in folders_of_verl(folder):
        description = _read(
            step, verl.TRANSFORMER_CONFIG, lambda text, where: verl.job_arguments(parse_json(text), where)
        )
        if description is not None:
            return description
    return None


def _nemo_description(folder: Path) -> Description | None:
    if folder.name != nemo.WEIGHTS:
        return None
    context = folder.parent / nemo.CONTEXT
    job = _read(context, nemo.EVERYTHING_FILE, lambda text, where: nemo.experiment_arguments(parse_json(text), where))
    model = _read(context, nemo.MODEL_FILE, lambda text, where: nemo.native_arguments(parse_yaml(text, where), where))
    if job is None or model is None:
        return model or job
    raw_arguments = {**model.arguments.raw, **job.arguments.raw}
    return Description(_partial(raw_arguments, folder), model.source, (*job.problems, *model.problems))


_READERS = (_bridge_description, _verl_description, _nemo_description)


def run_config_of(folder: Path) -> dict[str, Any] | None:
    """Return the content of Megatron-Bridge's `run_config.yaml`; None if it is missing or invalid."""
    try:
        where = str(folder / bridge.RUN_CONFIG)
        content = parse_yaml(read_file(folder, bridge.RUN_CONFIG, MOST_BYTES).decode(), where)
        bridge.job_arguments(content, where)
    except (OSError, ValueError, ContentError):
        return None
    return dict(content)


def _read(folder: Path, name: str, arguments_of: Callable[[str, str], JobArguments]) -> Description | None:
    """Read a file; an invalid file is reported and ignored.

    Raises:
        OverBudgetError: parsing takes far more work than the file's size explains, so the checkpoint is not trusted.
    """
    where = str(folder / name)
    try:
        return Description(arguments_of(read_file(folder, name, MOST_BYTES).decode(), where), name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OverBudgetError:
        raise
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, ContentError) as error:
        problem = shorten(str(error))
    return Description(_partial({}, folder), name, (f"{name} is ignored: {problem}",))
