"""The processes that torchrun or srun has started together, from their environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mcore_ckpt_ext.errors import UsageError

STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Only torchrun sets it (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
_FIRST_PORT = 20_000
_PORTS = 10_000
_FIRST_NODE = re.compile(r"(?P<name>[^,\[]+)(\[(?P<number>\d+))?")


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks.

    Attributes:
        rank: global rank of this process.
        total: number of ranks.
        local: rank of this process on its node.
        on_node: number of ranks on its node.
    """

    rank: int
    total: int
    local: int
    on_node: int


def place_among_ranks(environment: Mapping[str, str]) -> Place | None:
    """Return the place of this process.

    Args:
        environment: environment variables of this process.

    Returns:
        None if neither torchrun nor srun has started several processes.
    """
    if STARTED_BY_TORCHRUN in environment:
        return Place(*(int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    if not started_by_srun(environment):
        return None
    total, nodes = (int(environment[f"SLURM_STEP_NUM_{unit}"]) for unit in ("TASKS", "NODES"))
    return Place(int(environment["SLURM_PROCID"]), total, int(environment["SLURM_LOCALID"]), total // nodes)


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process together with others.

    Batch scripts have SLURM_PROCID and SLURM_NTASKS, too; only srun describes its step
    (https://slurm.schedmd.com/srun.html and sbatch.html, output environment variables).
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return tasks.isascii() and tasks.isdigit() and int(tasks) > 1 and "SLURM_PROCID" in environment


def variables_of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which torch connects the processes of an srun step, without those set.

    Returns:
        RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; nothing if srun has not started several processes.

    Raises:
        UsageError: the first node is unknown.
    """
    if not started_by_srun(environment):
        return {}
    meeting = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": first_node(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS),
    }
    return {name: value for name, value in meeting.items() if name not in environment}


def first_node(nodes: str) -> str:
    """Return the first node of a Slurm node list: `gpu03` for `gpu[03-05,9],login`.

    Raises:
        UsageError: the list is invalid.
    """
    match = _FIRST_NODE.match(nodes)
    if match is None:
        raise UsageError("the first node of this job is unknown", found=nodes, hint="set MASTER_ADDR")
    return match["name"] + (match["number"] or "")
