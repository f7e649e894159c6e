"""Generate the table of models with which each family was checked, and the first Megatron release for it.

    python scripts/checked_models.py

The first release is the oldest one with the arguments of a model of the family, by `since` in the table of arguments.
The models are those of tests/huggingface: `published` and `own_code`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.families.checked import TABLE
from mcore_ckpt_ext.families.config_keys import neutral_keys
from mcore_ckpt_ext.families.recognition import FAMILIES, family_of_config
from mcore_ckpt_ext.families.text_parts import class_of_text, text_config
from mcore_ckpt_ext.job.arguments.row import Changes
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.versions import OLDEST, Version, parse_version

_MODELS = Path(__file__).parents[1] / "tests" / "huggingface"
_BY_TYPE = "ipex"
_OF_OWN_CODE = re.compile(r"^\| `([\w-]+)` \|.* of \S+/(\S+) \|$", re.MULTILINE)
_RENAMED = {"layernorm_epsilon", "layernorm_zero_centered_gamma", "hybrid_layer_pattern"}
"""Arguments that have another name in older releases."""
_NOT_NEEDED = {"rope_type": "yarn"}
"""Values that older releases have without the argument."""
_YARN = Version(0, 19)
"""The first release with `--position-embedding-type yarn` (megatron/training/arguments.py)."""


def table() -> dict[str, dict[str, Any]]:
    """Return the release and the models by model type."""
    since: dict[str, list[Version]] = defaultdict(list)
    models: dict[str, list[str]] = defaultdict(list)
    for name, config in [*_published(), *_tiny()]:
        described = text_config(config) or config
        try:
            family = family_of_config(described, name)
            neutral = neutral_keys(described, class_of_text(config, described), config)
            arguments = family.arguments(described, neutral).replace(mtp_num_layers=None)
            since[family.model_type].append(_release(arguments))
        except CheckpointError:  # a published model that is refused
            continue
        if name:
            models[family.model_type].append(name)
    for family in FAMILIES:
        if not since[family.model_type]:  # the same model with another type
            since[family.model_type] = since[type(family).__mro__[1].model_type]
    return {
        kind: {"since": str(min(since[kind])), "models": [*dict.fromkeys(models[kind])]}
        for kind in (family.model_type for family in FAMILIES)
    }


def _published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and configurations; one that is only there for its type has no name."""
    for file in sorted((_MODELS / "published").glob("*.json")):
        origin, _, name = file.stem.rpartition("--")
        yield "" if origin == _BY_TYPE else name, json.loads(file.read_text())
    for folder, name in _OF_OWN_CODE.findall((_MODELS / "own_code" / "README.md").read_text()):
        yield name, json.loads((_MODELS / "own_code" / folder / "config.json").read_text())


def _tiny() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the models of the tests, which are not published ones."""
    from tests.harness.huggingface import CONFIGS

    return (("", make().to_dict()) for make in CONFIGS.values())


def _release(arguments: ModelArguments) -> Version:
    """Return the oldest release with the arguments of a model."""
    needed = [OLDEST]
    for name, value in arguments.as_dict().items():
        row = ROWS.get(name)
        since = parse_version(row.since or "") if row and name not in _RENAMED else None
        if row is None or since is None or value in (None, row.values.default, _NOT_NEEDED.get(name)):
            continue
        conditions = row.effect.only_with if isinstance(row.effect, Changes) else ()
        if not conditions or any(condition.holds(arguments.get) for condition in conditions):
            needed.append(since)
    if arguments.position_embedding_type == "yarn" and not arguments.multi_latent_attention:
        needed.append(_YARN)
    return max(needed)


def main() -> None:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    rows = ",\n".join(f" {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in table().items())
    TABLE.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
