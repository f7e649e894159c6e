"""Settings of torchrun that keep a job from going on when a node dies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_LAUNCHER = re.compile(r"(^|/|\.)(torchrun|torch\.distributed\.run|ft_launcher)$")
_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


def hazards(environment: Mapping[str, str], agent: Sequence[str], arguments: object) -> Iterator[str]:
    """Yield what this job cannot survive, or what it loses, in words.

    Args:
        environment: the variables of a worker on the first node.
        agent: the command line of its agent; empty if it is unknown.
        arguments: Megatron's arguments.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        yield "torchrun did not start this job: nothing starts it again when a node dies"
        return
    if environment.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        yield "--max-restarts 0: the first node that dies ends the job"
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # `next_rendezvous` writes the address of that store once, in the round in which it is made.
        yield (
            f"agents share their store with the workers: a node that returns waits for MASTER_ADDR in vain, and so do "
            f"all if the first node dies; export {_STORE} on every node"
        )
    options = _options_of(agent) if any(_LAUNCHER.search(word) for word in agent) else {}
    if options and ":" not in (nodes := options.get("nnodes", "1")):
        yield f"--nnodes {nodes}: the number of nodes is fixed; give MIN:MAX"
    if options.get("rdzv_backend") == "c10d" and not re.search(
        r"\bis_host=(0|false)\b", options.get("rdzv_conf", ""), re.IGNORECASE
    ):
        yield (
            "the rendezvous may be hosted by a node that trains, whose death ends the job: host it elsewhere "
            "(docs: Elastic jobs), and pass --rdzv-conf is_host=0"
        )
    save, load = (getattr(arguments, name, None) for name in ("save", "load"))
    if save is None or not getattr(arguments, "save_interval", None):
        yield "without --save and --save-interval, the job begins again when a node dies"
    elif load is None or Path(load) != Path(save):
        origin = load or "the beginning"
        yield f"--load is not --save: after a death the job goes on from {origin}, not from what it saved"
    if not getattr(arguments, "exit_signal_handler", False):
        yield "without --exit-signal-handler, a node that returns costs the steps since the last save"


def _options_of(command: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line by name; torchrun takes both dashes and underscores."""
    options: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=False):
        if word.startswith("--"):
            name, is_joined, value = word[2:].partition("=")
            options.setdefault(name.replace("-", "_"), value if is_joined else following)
    return options
