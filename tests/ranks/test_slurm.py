"""The Slurm job of docs/, with Slurm's commands replaced: its two nodes are both this machine."""

import os
import re
import socket
import subprocess
import sys

import pytest

from manyranks.training.__main__ import main
from manyranks.world.local import loopback
from tests.conftest import ROOT

JOB = ROOT / "docs" / "train.sbatch"
SMALL = ["--layers", "2", "--hidden", "32", "--seq", "32", "--batch", "4", "--tp", "2"]
STAND_INS = {
    "scontrol": 'test "$*" = "show hostnames node[0-1]" && printf "localhost\\nlocalhost\\n"',
    "srun": '"$@" & first=$!; "$@" & second=$!; wait $first; one=$?; wait $second && exit $one',
    "torchrun": f'exec {sys.executable} -W ignore -m torch.distributed.run "$@"',
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The environment of a job on two nodes of one rank each."""
    for name, does in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    own = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    own |= {"RANKS_PER_NODE": "1", "PORT": str(port), "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"GLOO_SOCKET_IFNAME": loopback()}


def job(environment: dict, *flags: str) -> str:
    """What the job prints."""
    done = subprocess.run(["bash", JOB, *flags], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return re.sub(r" in [0-9.]+ s", "", done.stdout)


@pytest.mark.whole  # it failed once in five runs, for a reason that is not known yet
def test_a_slurm_job_goes_on_with_what_another_run_has_left_and_learns_the_same(slurm, tmp_path, capsys):
    folder = ["--checkpoint", str(tmp_path / "run")]
    main([*SMALL, *folder, "--steps", "2"])
    main([*SMALL, "--steps", "4"])
    whole = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  step")][2:]
    printed = job(slurm, *SMALL, *folder, "--resume", "--steps", "4")
    assert "on 2 ranks (dp 1 · pp 1 · cp 1 · tp 2)" in printed
    assert [line for line in printed.splitlines() if line.startswith("  step")] == whole[2:]
