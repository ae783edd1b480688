"""The commands for several nodes, as CLUSTERS.md, docs/train.sbatch and lab 10 have them. Both nodes are this machine."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from manyranks.training.__main__ import main
from manyranks.world.processes.local import loopback
from tests.conftest import ROOT, free_port

SMALL = ["--layers", "2", "--hidden", "32", "--seq", "32", "--batch", "4", "--dp", "1", "--tp", "2", "--heads", "4"]
STAND_INS = {
    "scontrol": 'test "$*" = "show hostnames node[0-1]" && printf "localhost\\nlocalhost\\n"',
    "srun": '"$@" & first=$!; "$@" & second=$!; wait $first; one=$?; wait $second && exit $one',
    "torchrun": f'exec {shlex.quote(sys.executable)} -W ignore -m torch.distributed.run "$@"',
}


def of_the_page() -> str:
    """The lines that CLUSTERS.md says to type on each node."""
    typed = (ROOT / "CLUSTERS.md").read_text(encoding="utf-8").partition("\n## torchrun\n")[2].split("```")[1]
    on_each = shlex.quote(typed.strip() + ' "$@"')
    return f'srun bash -c {on_each} node "$@"'


def of_the_lab() -> str:
    """The job that lab 10 shows."""
    lab = json.loads((ROOT / "notebooks" / "lab" / "10_nd_parallel.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in lab["cells"]]
    (job,) = [block for cell in cells for block in re.findall(r"```bash\n(.*?)```", cell, re.DOTALL) if "#SBATCH" in block]
    return job.strip() + ' "$@"'


def of_docs() -> str:
    """The job in docs/."""
    return (ROOT / "docs" / "train.sbatch").read_text(encoding="utf-8")


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """The environment of a job on two nodes of one rank each."""
    for name, does in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    own = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    own |= {"RANKS_PER_NODE": "1", "RESTARTS": "3", "KILLED": str(tmp_path / "killed"), "PYTHONPATH": str(ROOT)}
    own |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
    return os.environ | own


def here(command: str, folder: Path) -> str:
    """The command with this machine's ports, folder and processors, and with a trainer that loses a rank."""
    changes = {
        r"\bnode0:": "localhost:",
        r"29500": str(free_port()),
        r"-per-node 8\b": "-per-node 1",
        r"/shared/run": str(folder),
    }
    for there, instead in changes.items():
        command = re.sub(there, instead, command)
    assert "-m manyranks.training" in command
    return command.replace("-m manyranks.training", "-m tests.ranks.killed")


@pytest.mark.parametrize(
    "command",
    [of_the_page, *(pytest.param(other, marks=pytest.mark.whole) for other in (of_docs, of_the_lab))],
    ids=lambda command: command.__name__,
)
def test_two_nodes_lose_a_rank_start_again_and_learn_what_one_machine_learns(command, nodes, tmp_path, capsys):
    main([*SMALL, "--steps", "4"])
    whole = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  step")]
    folder = tmp_path / "run"
    main([*SMALL, "--steps", "2", "--checkpoint", str(folder)])
    flags = [*SMALL, "--steps", "4", "--checkpoint", str(folder), "--save-every", "1", "--resume"]
    done = subprocess.run(
        ["bash", "-c", here(command(), folder), "job", *flags],
        env=nodes,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert f"goes on after step 2, from the checkpoint in {folder}" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("  step")] == whole[2:]
