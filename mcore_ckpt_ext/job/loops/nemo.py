"""Reads the job description of NeMo 2's checkpoints, without importing the classes that it names.

A checkpoint has a folder `weights/`, which Megatron Core writes without arguments, and a folder `context/`. Source:
`TrainerContext.io_dump` (nemo/lightning/io/pl.py, io/mixin.py), `ckpt_utils.py` and
`MegatronStrategy.save_checkpoint` (nemo/lightning/pytorch/strategies/megatron_strategy.py) of NeMo 2.3.2. `io.json` is
the Fiddle configuration of model and trainer without defaults. `model.yaml`, which older releases lack, is the
configuration of the model with defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.job.dimensions import MODEL_SIZE_ARGUMENTS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.loops.bridge import section_arguments
from mcore_ckpt_ext.job.loops.transformer import is_plain, model_arguments

WEIGHTS = "weights"
CONTEXT = "context"
"""The two folders of a checkpoint."""
MODEL_FILE = "model.yaml"
EVERYTHING_FILE = "io.json"
"""The files in folder `context`."""
PREFIX = "module."
"""The prefix of all keys, which Megatron's own do not have (`MegatronParallel.sharded_state_dict`)."""

# Values of `Llama31Config`, besides the scaling factor, that equal Megatron's (`apply_rope_scaling`).
_LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
_ATTRIBUTE = re.compile(r"Attr\(name='(\w+)'\)", re.ASCII)
_LAYOUT = (*MODEL_SIZE_ARGUMENTS, "sequence_parallel")


def native_arguments(content: Any, source: str) -> JobArguments:
    """Return the arguments in `model.yaml`.

    Parameters and errors are those of `bridge.job_arguments`.
    """
    if not isinstance(content, Mapping):
        raise ValueError("it is no object")
    return JobArguments.of(_model_arguments(content), source=source, is_complete=False)


def experiment_arguments(content: Any, source: str) -> JobArguments:
    """Return the arguments in `io.json`: of the model, and of the trainer's strategy.

    Parameters and errors are those of `bridge.job_arguments`.
    """
    reader = _Fiddle(content)
    root = reader.fields(reader.root)
    model = reader.fields(root.get("model"))
    plain = {"config": reader.plain(model.get("config")), "optim": {"config": _inner(reader, model, "optim", "config")}}
    strategy = _inner(reader, root, "trainer", "strategy")
    layout = {name: strategy[name] for name in _LAYOUT if strategy.get(name) is not None and is_plain(strategy[name])}
    buffers = section_arguments("ddp", _inner(reader, root, "trainer", "strategy", "ddp"))
    return JobArguments.of({**_model_arguments(plain), **layout, **buffers}, source=source, is_complete=False)


def _model_arguments(model: Mapping[str, Any]) -> dict[str, Any]:
    config = model.get("config")
    if not isinstance(config, Mapping) or not config:
        raise ValueError("it has no configuration of a model")
    # A dtype without a YAML representer is written as its class.
    fields = {name: value for name, value in config.items() if value != {"_target_": "torch.dtype", "_call_": True}}
    arguments = model_arguments(fields)
    if isinstance(length := config.get("seq_length"), int):
        arguments |= {"seq_length": length, "max_position_embeddings": length}
    if (factor := config.get("scale_factor")) is not None and all(
        config.get(name) == at for name, at in _LLAMA_3.items()
    ):
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
    optim = model.get("optim")
    optimizer = optim.get("config") if isinstance(optim, Mapping) else None
    return arguments | section_arguments("optimizer", optimizer if isinstance(optimizer, Mapping) else {})


def _inner(reader: _Fiddle, root: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """Return the plain fields of the configuration at a path; empty if a part of the path is missing."""
    fields = root
    for name in path[:-1]:
        fields = reader.fields(fields.get(name))
    return reader.plain(fields.get(path[-1]))


class _Fiddle:
    """Reads Fiddle JSON (`serialization.dump_json`, fiddle 0.3): objects by key that refer to each other.

    References may form cycles, or refer to one object many times. Only a few fixed paths are read, so the work is
    bounded.
    """

    def __init__(self, content: Any) -> None:
        if not isinstance(content, Mapping) or not isinstance(content.get("objects"), Mapping):
            raise ValueError("it has no objects")
        self._objects: Mapping[str, Any] = content["objects"]
        self.root = content.get("root")

    def fields(self, value: Any) -> dict[str, Any]:
        """Return the fields of a configuration, unresolved."""
        node = self._resolve(value)
        items = node.get("items") if isinstance(node, Mapping) else None
        fields: dict[str, Any] = {}
        for item in items if isinstance(items, list) else ():
            if isinstance(item, list) and len(item) == 2 and (name := _ATTRIBUTE.fullmatch(str(item[0])[:200])):
                fields[name[1]] = item[1]
        return fields

    def plain(self, value: Any) -> dict[str, Any]:
        """Return the fields that are plain values, lists of them, or names of classes, functions and dtypes."""
        fields = self.fields(value)
        return {name: plain_value for name, item in fields.items() if (plain_value := self._value(item)) is not None}

    def _value(self, value: Any) -> Any:
        node = self._resolve(value)
        if not isinstance(node, Mapping):
            return node if is_plain(node) else None
        if node.get("type") == "leaf":
            return node["value"] if is_plain(node.get("value")) else None
        if node.get("type") == "pyref":
            return {"_target_": f"{node.get('module')}.{node.get('name')}", "_call_": False}
        kind = node.get("type")
        if isinstance(kind, Mapping) and kind.get("name") in ("list", "tuple") and isinstance(node.get("items"), list):
            leaves = [item[1] for item in node["items"] if isinstance(item, list) and len(item) == 2]
            values = [leaf.get("value") if isinstance(leaf, Mapping) else leaf for leaf in leaves]
            return values if is_plain(values) else None
        return None

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("type") == "ref":
            return self._objects.get(str(value.get("key")))
        return value
