"""Generate the table of `config.json` keys that model classes of transformers declare and read.

Run it once for each release of transformers, with that release on the path. It replaces the column of the release and
keeps the others.

    python scripts/config_reads.py
    PYTHONPATH=/folder/with/transformers-4.57.1 python scripts/config_reads.py

A key counts as read if a tiny model of the class looks up this attribute of a recording configuration while it is built
and run, if the constructor takes it from its keyword arguments, or, because no run takes all branches, if the modeling
file contains `config.NAME` or `getattr(config, "NAME")`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from scaled_configs import VOCABULARY, scaled

from mcore_ckpt_ext.families.config_keys import TABLE
from mcore_ckpt_ext.families.recognition import FAMILIES
from mcore_ckpt_ext.families.text_parts import TEXT_OF

_BASE = "PretrainedConfig"
_TOKENS = torch.arange(24).view(1, 24) % VOCABULARY
# Sizes that a class requires without a default.
_NEEDED = {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 1, "n_routed_experts": 4,
    "n_shared_experts": 1,
}  # fmt: skip

# Frequencies of a scaled head for each axis of images, for classes that do not scale them.
_AXES = {
    "Qwen2VLTextConfig": [3, 3, 2], "Qwen2_5_VLTextConfig": [3, 3, 2], "Qwen3VLTextConfig": [3, 3, 2],
    "Qwen3VLMoeTextConfig": [3, 3, 2], "Qwen2_5OmniTextConfig": [3, 3, 2], "Qwen3OmniMoeTextConfig": [3, 3, 2],
    "Glm4vMoeTextConfig": [1, 1, 0],
}  # fmt: skip


class _RecordedArguments(dict[str, Any]):
    """Keyword arguments that record which of them are looked up."""

    def __init__(self, given: dict[str, Any], seen: set[str]) -> None:
        super().__init__(given)
        self._seen = seen

    def __getitem__(self, key: str) -> Any:
        self._seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._seen.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._seen.add(key)
        return super().setdefault(key, default)


def _recording(function: Callable[..., Any], seen: set[str]) -> Callable[..., Any] | None:
    """Return a function with its `**kwargs` recorded; None if it has no `**kwargs` or no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef) or definition.args.kwarg is None:
        return None
    name = definition.args.kwarg.arg
    definition.decorator_list = []
    definition.body.insert(0, ast.parse(f"{name} = __recorded__({name})").body[0])
    # `super()` without arguments needs the cell of its class.
    owner = function.__qualname__.rpartition(".")[0]
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            node.args = [ast.Name("__owner__", ast.Load()), ast.Name("self", ast.Load())]
    ast.fix_missing_locations(tree)
    module = sys.modules[function.__module__]
    names = {**vars(module), "__recorded__": lambda given: _RecordedArguments(given, seen)}
    names["__owner__"] = getattr(module, owner, None)
    exec(compile(tree, f"<recorded {function.__qualname__}>", "exec"), names)
    return names[definition.name]


@contextlib.contextmanager
def _recorded(config_class: type) -> Iterator[set[str]]:
    """Record every attribute that is looked up on configurations of a class, and every keyword argument it takes."""
    seen: set[str] = set()
    replaced: list[tuple[type, str, Any]] = []
    for owner in config_class.__mro__:
        if not owner.__module__.startswith("transformers."):
            continue
        for name, member in list(vars(owner).items()):
            if inspect.isfunction(member) and not name.startswith(("from_", "save_", "push_", "get_config_dict")):
                wrapped = _recording(inspect.unwrap(member), seen)
                if wrapped is not None and not (name == "__init__" and hasattr(owner, "__post_init__")):
                    replaced.append((owner, name, member))
                    setattr(owner, name, wrapped)
    plain = config_class.__getattribute__

    def lookup(self: object, key: str) -> Any:
        seen.add(key)
        return plain(self, key)

    config_class.__getattribute__ = lookup  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del config_class.__getattribute__
        for owner, name, member in replaced:
            setattr(owner, name, member)


def _declared(config_class: type) -> dict[str, Any]:
    """Return the constructor's parameters with their defaults, of all classes up to the base."""
    found: dict[str, Any] = {}
    for owner in reversed(config_class.__mro__):
        if owner.__module__.startswith("transformers.") and "__init__" in vars(owner):
            for name, parameter in inspect.signature(owner.__init__).parameters.items():
                if name not in ("self", "args") and parameter.kind is not parameter.VAR_KEYWORD:
                    found[name] = None if parameter.default is parameter.empty else parameter.default
    return found


def _in_text(module: Any) -> set[str]:
    """Return the keys that a modeling file reads in any branch."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = node.args[:2]
            if _is_config(owner) and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "config" or name.endswith("_config")


def _run(config_class: type) -> set[str]:
    """Return all keys that are read while a tiny model is built and run, with each kind of attention."""
    plain = config_class().to_dict()
    plain = {key: value for key, value in plain.items() if not key.startswith("_") and value is not None}
    stated = {key: value for key, value in scaled(plain).items() if value != plain[key]}
    stated |= {key: size for key, size in _NEEDED.items() if key in _declared(config_class) and key not in plain}
    if config_class.__name__ in _AXES:
        axes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": _AXES[config_class.__name__]}
        stated["rope_parameters" if "rope_parameters" in _declared(config_class) else "rope_scaling"] = axes
    with _recorded(config_class) as seen:
        for attention in ("eager", None):
            config = config_class(**stated)
            model = _built_by(config_class).from_config(config, attn_implementation=attention).eval()
            with torch.no_grad():
                model(_TOKENS, use_cache=True)
            model.train()(_TOKENS)[0].sum().backward()
    return seen


def _built_by(config_class: type) -> Any:
    """Return the class for a configuration; a language model of a vision-language model has no head."""
    return AutoModelForCausalLM if config_class in AutoModelForCausalLM._model_mapping else AutoModel


def _text_class(model_type: str) -> type | None:
    try:
        found = type(AutoConfig.for_model(model_type))
    except ValueError:
        return None
    if model_type in TEXT_OF:
        inside = AutoConfig.for_model(model_type).get_text_config()
        return type(inside)
    return found


def _plain(value: Any) -> Any:
    """Return a default as a JSON value, or as a text that no configuration has if JSON cannot express it."""
    try:
        json.dumps(value)
    except TypeError:
        return f"<{type(value).__name__}>"
    return value


def table() -> dict[str, Any]:
    """Return the keys that classes of the installed release declare, with defaults, and read."""
    base = transformers.PretrainedConfig
    of_base = {name: _plain(value) for name, value in _declared(base).items()}
    names = sorted(name for name in dir(base()) if not name.startswith("__"))
    found: dict[str, Any] = {_BASE: {"declares": dict(sorted(of_base.items())), "reads": names}}
    for model_type in sorted({*(family.model_type for family in FAMILIES), *TEXT_OF}):
        if (config_class := _text_class(model_type)) is None:
            continue
        declared = {name: _plain(value) for name, value in _declared(config_class).items()}
        declared = {name: value for name, value in declared.items() if of_base.get(name, "") != value}
        if config_class not in _built_by(config_class)._model_mapping:
            continue  # no class of transformers builds the text part alone, so that none can be run
        model_class = _built_by(config_class)._model_mapping[config_class]
        sys.stderr.write(f"{model_type}\n")
        reads = {*_run(config_class), *_in_text(sys.modules[model_class.__module__])}
        reads |= {*config_class.attribute_map} | {name for name in dir(config_class) if not name.startswith("__")}
        reads = {name for name in reads if re.fullmatch(r"[A-Za-z_]\w*", name) and not name.startswith("__")}
        found[model_type] = {
            "class": config_class.__name__, "model": model_class.__name__,
            "declares": dict(sorted(declared.items())), "reads": sorted(reads - declared.keys() - {*names}),
        }  # fmt: skip
    return found


def main() -> None:
    """Write the column of the installed release."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    known = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known[transformers.__version__] = table()
    lines = [
        f" {json.dumps(release)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in known[release].items())
        + "\n }"
        for release in sorted(known, key=lambda text: [int(part) for part in text.split(".")])
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
