"""The reader's own script: each step equals one process, and sends what theory says."""

import ast
import difflib
import importlib.util
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import manyranks as mr
from manyranks.theory import collectives, sharding
from tests.conftest import ROOT, matrix

FOLDER = ROOT / "notebooks" / "train"
FIRST, *STEPS = sorted(FOLDER.glob("*.py"))
SIZES = {"layers": 4, "hidden": 40, "heads": 4, "kv_heads": 2, "ffn": 50, "seq": 24, "batch": 10, "dtype": "float64"}
BUILT_IN = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining", "torch.nn.parallel")


def weights(path: Path, steps: int = 3, **sizes) -> dict[str, torch.Tensor]:
    """What a script's train() returns, in this process; prints nothing."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.print = lambda *_, **__: None
    try:
        return {name: w.detach().clone() for name, w in module.train(module.Config(**SIZES | sizes, steps=steps)).items()}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def alone():
    with mr.World(1) as world:
        return world.run(weights, FIRST)[0]


def units(tensors: dict[str, torch.Tensor]) -> list[int]:
    """Elements of the embedding, of each layer, and of the head."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[name.split(".")[0]] = sizes.get(name.split(".")[0], 0) + tensor.numel()
    return list(sizes.values())


@pytest.mark.parametrize("n", matrix([1, 2, 3, 4], [3]))
def test_each_step_of_the_script_is_one_process_and_sends_the_bytes_of_theory(n, alone):
    total = collectives.sent_bytes("all_reduce", 1, 8, n)  # of the printed loss
    with mr.World(n) as world:
        for path in STEPS:
            two, three = (world.measure(weights, path, steps) for steps in (2, 3))
            gap = max((found[name] - alone[name]).abs().max().item() for found in three.results for name in alone)
            assert gap < 1e-9, path.stem
            sent = [three.payload_bytes[rank] - two.payload_bytes[rank] - total[rank] for rank in range(n)]
            if path.stem == "02_data_parallel":
                row = sum(w.numel() for w in alone.values())
                assert sent == pytest.approx(
                    [collectives.sent_bytes("all_reduce", row, 8, n)[rank] for rank in range(n)], abs=64
                )
            else:
                assert sent == [sharding.sent(units(alone), n, 3, 8, 8).total] * n


def by_name(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """All stages' weights."""
    return {name: tensor for found in results for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("n", "pp", "m"), matrix([(2, 2, 1), (4, 2, 3), (3, 3, 2), (4, 4, 5), (4, 4, 3), (2, 1, 3)], [(4, 2, 3)])
)
def test_stages_are_one_process_and_send_what_theory_says(n, pp, m, alone):
    d = n // pp
    shares = [len(share) for share in torch.empty(SIZES["batch"]).tensor_split(d)]
    with mr.World(n) as world:
        for path in STEPS[3:]:
            two, three = (world.measure(weights, path, steps, pp=pp, micro=m) for steps in (2, 3))
            found = by_name(three.results)
            assert found.keys() == alone.keys()
            assert max((found[name] - alone[name]).abs().max().item() for name in alone) < 1e-9, path.stem
            for rank, own in enumerate(three.results):
                stage, place = divmod(rank, d)
                size = shares[place] * SIZES["seq"] * SIZES["hidden"] * 8
                messages = size * ((stage < pp - 1) + (stage > 0))
                sharded = sharding.sent(units(own), d, 2 if m > 1 else 3, 8, 8).total
                total = collectives.sent_bytes("all_reduce", 1, 8, n)[rank]
                assert three.payload_bytes[rank] - two.payload_bytes[rank] == messages + sharded + total


@pytest.mark.parametrize(("pp", "m", "batch", "said"), [(1, 1, 1, "batch=1 on 2 ranks"), (1, 6, 11, "m=6: use at least 12")])
def test_a_rank_without_a_sequence_is_refused(pp, m, batch, said):
    with mr.World(2) as world:
        for path in STEPS if m == 1 else STEPS[3:]:
            how = {"pp": pp, "micro": m} if path in STEPS[3:] else {}
            with pytest.raises(mr.RankFailed, match=said):
                world.run(weights, path, 1, batch=batch, **how)


@pytest.mark.parametrize(("pp", "said"), [(3, "pp=3 on 4 ranks, 6 parts: divide 4"), (8, "pp=8 on 4 ranks")])
def test_stages_that_ranks_cannot_share_are_refused(pp, said):
    with mr.World(4) as world, pytest.raises(mr.RankFailed, match=said):
        world.run(weights, STEPS[3], 1, pp=pp)


def test_recomputation_needs_less_memory(alone):
    with mr.World(2) as world:
        peaks = [world.measure(weights, path, 1, memory=True).peak_bytes[0] for path in STEPS]
    assert peaks[STEPS.index(FOLDER / "04_checkpointing.py")] < 0.8 * peaks[STEPS.index(FOLDER / "03_zero.py")]


@pytest.mark.parametrize("path", [FIRST, *STEPS], ids=lambda path: path.stem)
def test_a_step_writes_everything_out(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not [name for name in found if name.startswith(BUILT_IN)]
    assert {name.split(".")[0] for name in found} <= {"torch", *sys.stdlib_module_names}


def test_a_step_has_at_most_80_new_lines_and_the_script_620():
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (FIRST, *STEPS)]
    for before, after in pairwise(texts):
        new = [line for line in difflib.unified_diff(before, after, n=0) if line.startswith("+") and not line.startswith("+++")]
        assert len(new) <= 80
    assert len(texts[-1]) <= 620


def test_the_script_runs_under_torchrun():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        STEPS[-1],
        *["--steps", "1", "--pp", "2", "--micro", "3"],
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "step 0: loss 5.5" in done.stdout, done.stderr
