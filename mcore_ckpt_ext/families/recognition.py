"""Recognizes a checkpoint's family by arguments and names, by `config.json`, or by a user's choice."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, with_indefinite_article
from mcore_ckpt_ext.families.arcee import Arcee
from mcore_ckpt_ext.families.bailing import BailingMoE, BailingMoeV2
from mcore_ckpt_ext.families.chatglm import ChatGLM
from mcore_ckpt_ext.families.deepseek_moe import DeepSeekMoE
from mcore_ckpt_ext.families.deepseek_v2 import DeepSeekV2
from mcore_ckpt_ext.families.deepseek_v3 import DeepSeekV3, KimiK2
from mcore_ckpt_ext.families.dots1 import Dots1
from mcore_ckpt_ext.families.entry_points import RegisteredFamily, loadable, registered_families
from mcore_ckpt_ext.families.ernie4_5 import Ernie45
from mcore_ckpt_ext.families.exaone import Exaone
from mcore_ckpt_ext.families.exaone4 import Exaone4
from mcore_ckpt_ext.families.exaone_moe import ExaoneMoE
from mcore_ckpt_ext.families.family import Family, names_matching, parameter_shapes
from mcore_ckpt_ext.families.gemma import Gemma
from mcore_ckpt_ext.families.gemma2 import Gemma2
from mcore_ckpt_ext.families.gemma3 import Gemma3
from mcore_ckpt_ext.families.glm import Glm
from mcore_ckpt_ext.families.glm4_moe import Glm4MoE
from mcore_ckpt_ext.families.glm4_moe_lite import Glm4MoELite
from mcore_ckpt_ext.families.gpt2 import GPT2
from mcore_ckpt_ext.families.gpt_bigcode import GPTBigCode
from mcore_ckpt_ext.families.gpt_neox import GPTNeoX
from mcore_ckpt_ext.families.gpt_oss import GptOss
from mcore_ckpt_ext.families.hy_v3 import HyV3
from mcore_ckpt_ext.families.indexed_attention import DeepSeekV32, GlmMoEDsa
from mcore_ckpt_ext.families.internlm2 import InternLM2
from mcore_ckpt_ext.families.internlm3 import InternLM3
from mcore_ckpt_ext.families.llama import Llama, Xverse
from mcore_ckpt_ext.families.llama_nemotron import LlamaNemotron
from mcore_ckpt_ext.families.mamba2 import Mamba2
from mcore_ckpt_ext.families.minimax_m2 import MiniMaxM2
from mcore_ckpt_ext.families.ministral3 import Ministral3
from mcore_ckpt_ext.families.mistral import Mistral
from mcore_ckpt_ext.families.mixtral import Mixtral
from mcore_ckpt_ext.families.nearest import unknown_family
from mcore_ckpt_ext.families.nemotron import Nemotron
from mcore_ckpt_ext.families.nemotron_h import NemotronH
from mcore_ckpt_ext.families.olmoe import OLMoE
from mcore_ckpt_ext.families.orion import Orion
from mcore_ckpt_ext.families.phi3 import Phi3
from mcore_ckpt_ext.families.qwen import Qwen
from mcore_ckpt_ext.families.qwen2 import MiMo, Qwen2
from mcore_ckpt_ext.families.qwen2_moe import Qwen2MoE
from mcore_ckpt_ext.families.qwen3 import Qwen3
from mcore_ckpt_ext.families.qwen3_5 import Qwen35, Qwen35MoE
from mcore_ckpt_ext.families.qwen3_moe import Qwen3MoE
from mcore_ckpt_ext.families.qwen3_next import Qwen3Next
from mcore_ckpt_ext.families.sarvam import SarvamMoE
from mcore_ckpt_ext.families.seed_oss import SeedOss
from mcore_ckpt_ext.families.smollm3 import SmolLM3
from mcore_ckpt_ext.families.stablelm import StableLM
from mcore_ckpt_ext.families.starcoder2 import StarCoder2
from mcore_ckpt_ext.families.text_parts import text_section
from mcore_ckpt_ext.families.unsupported import NOT_IN_MEGATRON
from mcore_ckpt_ext.job.model_arguments import ModelArguments

FAMILIES: tuple[Family, ...] = (
    GPT2(),
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
    Mixtral(),
    Qwen2MoE(),
    Qwen3MoE(),
    DeepSeekV2(),
    DeepSeekV3(),
    KimiK2(),
    Gemma2(),
    Glm4MoE(),
    SeedOss(),
    Ernie45(),
    SmolLM3(),
    StarCoder2(),
    Phi3(),
    Arcee(),
    MiniMaxM2(),
    OLMoE(),
    GptOss(),
    Qwen3Next(),
    Qwen35(),
    Qwen35MoE(),
    Gemma3(),
    Glm4MoELite(),
    InternLM3(),
    MiMo(),
    DeepSeekV32(),
    GlmMoEDsa(),
    NemotronH(),
    StableLM(),
    GPTBigCode(),
    Nemotron(),
    Glm(),
    Ministral3(),
    Gemma(),
    GPTNeoX(),
    HyV3(),
    ExaoneMoE(),
    InternLM2(),
    ChatGLM(),
    Qwen(),
    DeepSeekMoE(),
    Exaone(),
    Orion(),
    BailingMoeV2(),
    BailingMoE(),
    Mamba2(),
    SarvamMoE(),
    LlamaNemotron(),
    Dots1(),
    Xverse(),
    Exaone4(),
)
_SHOWN = 4
_LISTED = "one of mcore-ckpt convert --list-families"


@dataclass(frozen=True)
class Fit:
    """A family, and the reasons why a checkpoint does not belong to it; empty if it does.

    `by_names`: the arguments match, only names may differ.
    """

    family: Family
    arguments: ModelArguments
    reasons: Sequence[str]
    by_names: bool = True

    @property
    def summary(self) -> list[str]:
        """The first reasons, and the number of others."""
        more = len(self.reasons) - _SHOWN
        return [*self.reasons[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def family_named(name: str) -> Family:
    """Return a family by name, by `model_type`, or as `path.py:Class`.

    Raises:
        UnsupportedCheckpointError: there is no such family.
    """
    if ".py:" in name:
        return _from_file(*name.rsplit(":", 1))
    for family in FAMILIES:
        if name.lower() in (family.name.lower(), family.model_type):
            return family
    for registered in installed_families():
        if name.lower() in (registered.class_name.lower(), registered.model_type):
            return registered.load()
    similar = get_close_matches(name.lower(), {known_name.lower(): known_name for known_name in _names()}, n=1)
    meant = next((known_name for known_name in _names() if [known_name.lower()] == similar), None)
    raise UnsupportedCheckpointError(
        "unknown model family",
        found=name,
        expected=_LISTED,
        hint=(f"did you mean --family {meant}? Or" if meant else "or")
        + " pass your own class (python -m pydoc mcore_ckpt_ext.families.family): --family path.py:Name",
    )


def installed_families() -> tuple[RegisteredFamily, ...]:
    """Return the families of other installed distributions, without loading them."""
    return registered_families(frozenset(family.model_type for family in FAMILIES))


def _names() -> list[str]:
    return [
        *(family.name for family in FAMILIES),
        *(registered.class_name for registered in installed_families()),
    ]


def _from_file(path: str, name: str) -> Family:
    """Load a family from the user's own file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UnsupportedCheckpointError(
            "the file does not exist", where=path, hint="correct the path: --family path.py:Name"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UnsupportedCheckpointError("the family's file raises an error", found=repr(error), where=path) from error
    family_class = getattr(module, name, None)
    if not (isinstance(family_class, type) and issubclass(family_class, Family)):
        raise UnsupportedCheckpointError(
            "the file has no family of that name",
            found=name,
            expected="a class derived from families.family.Family",
            where=path,
        )
    return family_class()


def family_of_config(config: Mapping[str, Any], where: str, names: Callable[[], Collection[str]] = tuple) -> Family:
    """Return the family that `config.json` names.

    Args:
        config: the `config.json` of the model.
        where: path of the file, for messages.
        names: returns the names of the model's tensors; called if the family is unknown.

    Raises:
        UnsupportedCheckpointError: the family is unknown, or the class is that of another family.
    """
    for family in FAMILIES:
        if config.get("model_type") == family.model_type:
            _check_class(family, config.get("architectures"), where)
            installed_families()  # warns if a distribution also registers this model_type
            return family
    for registered in installed_families():
        if config.get("model_type") == registered.model_type:
            return registered.load()
    kinds = [str(part.get("model_type")) for part in (config, text_section(config) or {})]
    if kind := next((kind for kind in kinds if kind in NOT_IN_MEGATRON), ""):
        raise UnsupportedCheckpointError(
            "Megatron Core has no such model, up to 0.19.2",
            found=f"model_type {kind}: {NOT_IN_MEGATRON[kind]}",
            where=where,
            hint="map it to layers of your own (python -m pydoc mcore_ckpt_ext.families.family): --family path.py:Name",
        )
    raise unknown_family(config, names(), FAMILIES, where)


def _check_class(family: Family, classes: object, where: str) -> None:
    """Check that `model_type` and `architectures` name the same family, as readers use either of them.

    A class of no known family may be a head, or a class of the folder's own code.
    """
    architectures = (family.architecture, family.alternative_architecture)
    others = {other.architecture: other.name for other in FAMILIES if other.architecture not in architectures}
    for name in classes if isinstance(classes, list) else ():
        if isinstance(name, str) and name in others:
            raise UnsupportedCheckpointError(
                "config.json names two model families",
                found=f"model_type {family.model_type}, architectures {name}",
                expected=family.architecture,
                where=where,
                hint=f"correct it, or choose: --family {family.name}, or --family {others[name]}",
            )


def family_of_megatron(
    arguments: ModelArguments,
    names: Collection[str] | None,
    wanted: Family | None = None,
    once: str | None = None,
    where: str | None = None,
) -> Fit:
    """Return the only family that matches a Megatron checkpoint, with the arguments for which it does.

    Families of other distributions are tried if none of this package matches, or if the model came from one.

    Args:
        arguments: arguments of the model, with `vocab_size` without padding.
        names: model-space names of its weights; None if it only has adapters.
        wanted: family that the user has chosen.
        once: `model_type` of the Hugging Face folder from which the model came, if any.
        where: path of the checkpoint, for messages.

    Raises:
        UnsupportedCheckpointError: no family matches, or several do.
    """
    fits = [fit(family, arguments, names) for family in ((wanted,) if wanted else FAMILIES)]
    if not wanted:
        is_one_of_ours = not all(candidate.reasons for candidate in fits)
        more = [
            registered for registered in installed_families() if not is_one_of_ours or registered.model_type == once
        ]
        fits += [fit(family, arguments, names) for family in map(loadable, more) if family]
    fitting = [candidate for candidate in fits if not candidate.reasons]
    if len(fitting) > 1:
        before = [candidate for candidate in fitting if candidate.family.model_type == once]
        fitting = before or [candidate for candidate in fitting if not candidate.family.prefer_other_family(arguments)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UnsupportedCheckpointError(
            "the checkpoint fits several model families",
            found=", ".join(candidate.family.described for candidate in fitting),
            where=where,
            hint=f"choose one: --family {fitting[0].family.name}",
        )
    fits.sort(key=lambda candidate: (not candidate.by_names, len(candidate.reasons)))
    raise UnsupportedCheckpointError(
        "the checkpoint matches no known model family"
        if wanted is None
        else f"the checkpoint does not match the model family {wanted.name}",
        found="; ".join(
            f"{candidate.family.name} does not match: {', '.join(candidate.summary)}"
            for candidate in fits[: 1 if fits[0].by_names else 3]
        ),
        expected=_LISTED,
        where=where,
        hint="write its family (python -m pydoc mcore_ckpt_ext.families.family): --family path.py:Name; or choose --to "
        "canonical, which stores every tensor under its name",
    )


def fit(family: Family, arguments: ModelArguments, names: Collection[str] | None) -> Fit:
    """Compare a Megatron checkpoint with a family, under the layer spec that its names follow."""
    try:
        return _fit(family, arguments, names)
    except UnsupportedCheckpointError as error:
        if not family.origin:
            raise
        return Fit(family, arguments, [str(error)], by_names=False)


def _with_converted_mtp(family: Family, arguments: ModelArguments, names: Collection[str]) -> ModelArguments:
    """Return the arguments without MTP layers if the checkpoint has none that the family converts."""
    mtp = {name for name in names if name.startswith("mtp.")}
    converted = mtp.difference(names_matching(mtp, family.megatron_left_out))
    return arguments if converted else arguments.replace(mtp_num_layers=None)


def _fit(family: Family, arguments: ModelArguments, names: Collection[str] | None) -> Fit:
    if names is not None:
        arguments = _with_converted_mtp(family, arguments, names)
    if mismatches := family.mismatches(arguments):
        return Fit(family, arguments, mismatches, by_names=False)
    if names is None:
        return Fit(family, arguments, [])
    left_out = set(names_matching(names, family.megatron_left_out))
    fits: list[Fit] = []
    for spec in dict.fromkeys((arguments.transformer_impl, "transformer_engine", "local")):
        under = arguments.replace(transformer_impl=spec)
        try:
            expected = set(parameter_shapes(family.tensors(under)))
        except UnsupportedCheckpointError as error:
            fits.append(Fit(family, under, [str(error)]))
            continue
        differing = [f"no {name}" for name in sorted(expected - set(names))]
        differing += [with_indefinite_article(name) for name in sorted(set(names) - expected - left_out)]
        fits.append(Fit(family, under, differing))
    return min(fits, key=lambda candidate: len(candidate.reasons))
