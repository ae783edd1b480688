"""The reader's own script: each step equals one process, and sends what theory says."""

import ast
import difflib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.measure.calls import Call
from manyranks.parallel.mesh import Mesh
from manyranks.theory import collectives, context, sharding
from manyranks.world.counted.measurement import Measurement, payload
from tests.conftest import ROOT, free_port, matrix

FOLDER = ROOT / "notebooks" / "train"
FIRST, *STEPS = sorted(FOLDER.glob("*.py"))
ND, FAILURES = FOLDER / "10_nd_parallel.py", FOLDER / "12_failures.py"
SIZES = {"layers": 4, "hidden": 40, "heads": 4, "kv_heads": 2, "ffn": 50, "seq": 24, "batch": 10, "dtype": "float64"}
BUILT_IN = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining", "torch.nn.parallel")


def weights(path: Path, steps: int = 2, change: Callable = lambda module: None, **sizes) -> dict[str, torch.Tensor]:
    """The weights that a script's train() returns here; prints nothing. change: what to do to the script before."""
    spec = importlib.util.spec_from_file_location("script", path)
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.print = lambda *_, **__: None
    change(module)
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


def unchecked(module) -> None:
    """Leaves out what the later scripts do after every hundredth step, for which copies are compared."""
    if hasattr(module, "Sharded"):
        module.Sharded.agree = lambda model: None


def second_step(measured: Measurement, rank: int, path: Path) -> list[Call]:
    """A rank's calls of the second of two steps: each ends with the sum of its loss."""
    n, scalars = len(measured.ranks), 1 + (path in STEPS[4:])  # the loss, and the gradient's norm
    calls = measured.calls[rank]
    sums = [i for i, call in enumerate(calls) if (call.op, call.bytes, len(call.ranks)) == ("all_reduce", 8, n)]
    return calls[sums[-1 - scalars] + 1 : sums[-1] + 1]


@pytest.mark.parametrize("n", matrix([1, 2, 3, 4], [3]))
def test_each_step_of_the_script_is_one_process_and_sends_the_bytes_of_theory(n, alone):
    total = collectives.sent_bytes("all_reduce", 1, 8, n)  # of the printed loss
    with mr.World(n) as world:
        for path in STEPS:
            measured = world.measure(weights, path, 2, unchecked)
            gap = max((found[name] - alone[name]).abs().max().item() for found in measured.results for name in alone)
            assert gap < 1e-9, path.stem
            scalars = 1 + (path in STEPS[4:])
            step = [sum(payload(call, rank) for call in second_step(measured, rank, path)) for rank in range(n)]
            sent = [step[rank] - scalars * total[rank] for rank in range(n)]
            if path.stem == "02_data_parallel":
                row = sum(w.numel() for w in alone.values())
                assert sent == pytest.approx(
                    [collectives.sent_bytes("all_reduce", row, 8, n)[rank] for rank in range(n)], abs=64
                )
            else:
                assert sent == [sharding.sent(units(alone), n, 3, 8, 8).total] * n


CUT = {"query": 0, "key": 0, "value": 0, "gate": 0, "up": 0, "output": 1, "down": 1}  # the dimension that ranks share


def by_name(results: list[dict[str, torch.Tensor]], pp: int, tp: int) -> dict[str, torch.Tensor]:
    """All stages' weights, whole; every data rank's must be the same."""
    found: dict[str, torch.Tensor] = {}
    for first in range(0, len(results), tp):
        for name, tensor in results[first].items():
            parts = [results[first + k][name] for k in range(tp)]
            dim = CUT.get(name.split(".")[-2])
            whole = tensor if dim is None else torch.cat(parts, dim)
            assert all(dim is not None or torch.equal(tensor, part) for part in parts), name
            assert torch.equal(found.setdefault(name, whole), whole), name
    return found


def sent_for(path: Path, own: dict[str, torch.Tensor], rank: int, n: int, pp: int, cp: int, tp: int, m: int) -> dict[str, int]:
    """Bytes that theory lets a rank send in a step, along each axis; `data` is dp and cp."""
    d = n // pp // cp // tp
    stage, place = rank // (n // pp), rank // tp // cp % d
    rows = len(torch.empty(SIZES["batch"]).tensor_split(d)[place])
    tokens = rows * SIZES["seq"] * SIZES["hidden"] * 8 // cp
    layers = len({name.split(".")[0] for name in own if "attention" in name})
    heads = SIZES["heads"] // tp, SIZES["kv_heads"] // tp, SIZES["hidden"] // SIZES["heads"]
    ring = context.ring(rows, SIZES["seq"], *heads, cp, 8, 8)
    uncut = [w.numel() for name, w in own.items() if name.split(".")[-2] not in CUT]
    scalars = 1 + (path in STEPS[4:])  # the loss, and the gradient's norm
    return {
        "pp": tokens // tp * ((stage < pp - 1) + (stage > 0)),  # activations and their gradients
        "data": sharding.sent(units(own), d * cp, 2 if m > 1 else 3, 8, 8).total,
        "cp": layers * (2 * ring.forward.bytes + ring.backward.bytes),  # forward, again and backward
        "tp": 12 * layers * tokens * (tp - 1) // tp  # two pairs, forward, again and backward
        + sum(collectives.sent_bytes("all_reduce", size, 8, tp)[rank % tp] for size in uncut),
        "all": scalars * collectives.sent_bytes("all_reduce", 1, 8, n)[rank],
    }


def sent_along(calls: list[Call], rank: int, mesh: Mesh) -> Counter:
    """Bytes that a rank sent in these calls, along each axis."""
    axes = {mesh.group(axis, rank): axis for axis in ("data", "cp", "tp")}
    found: Counter = Counter()
    for call in calls:
        found[axes.get(call.ranks, "all" if call.peer is None else "pp")] += payload(call, rank)
    return found


PLANS = [  # ranks, pp, cp, tp, m
    (2, 2, 1, 1, 1),
    (4, 2, 1, 1, 3),
    (3, 3, 1, 1, 2),
    (4, 4, 1, 1, 5),
    (4, 4, 1, 1, 3),
    (2, 1, 1, 1, 3),
    (2, 1, 1, 2, 1),
    (4, 2, 1, 2, 3),
    (4, 1, 1, 2, 2),
    (2, 1, 2, 1, 1),
    (3, 1, 3, 1, 2),
    (4, 1, 4, 1, 1),
    (4, 1, 2, 1, 3),
    (4, 1, 2, 2, 2),
    (4, 2, 2, 1, 3),
    (16, 2, 2, 2, 3),
]


EVERY = [  # plan, the scripts that can have it
    (plan, tuple(path for path in STEPS[5 if plan[2] > 1 else 4 if plan[3] > 1 else 3 :] if plan[0] <= 4 or path >= ND))
    for plan in PLANS
]
SOME = [  # each script with stages or rings; those with split layers that no other test splits; all axes at once
    ((4, 2, 1, 1, 3), (STEPS[3],)),
    ((4, 2, 1, 2, 3), (STEPS[4], *STEPS[6:8])),
    ((3, 1, 3, 1, 2), (STEPS[5], STEPS[7])),
    (PLANS[-1], (ND,)),
]


@pytest.mark.parametrize(("plan", "paths"), matrix(dict.fromkeys(SOME + EVERY), SOME))
def test_stages_split_layers_and_sequences_are_one_process_and_send_what_theory_says(plan, paths, alone):
    n, pp, cp, tp, m = plan
    with mr.World(n) as world:
        for path in paths:
            sizes = (
                {"pp": pp, "micro": m} | ({"tp": tp} if path in STEPS[4:] else {}) | ({"cp": cp} if path in STEPS[5:] else {})
            )
            measured = world.measure(weights, path, 2, unchecked, **sizes)
            found = by_name(measured.results, pp, tp)
            assert found.keys() == alone.keys()
            assert max((found[name] - alone[name]).abs().max().item() for name in alone) < 1e-9, path.stem
            for rank, own in enumerate(measured.results):
                step, theory = second_step(measured, rank, path), sent_for(path, own, rank, n, pp, cp, tp, m)
                assert sum(payload(call, rank) for call in step) == sum(theory.values()), path.stem
                if n == 16:  # all groups differ
                    assert sent_along(step, rank, Mesh(pp=pp, dp=2, cp=cp, tp=tp)) == theory, path.stem


def mixed(steps: int = 2) -> dict[str, torch.Tensor]:
    """The weights that one process learns if each expert sees all tokens, and counts for the ones that chose it."""

    def forward(experts, x):
        best, chosen = experts.router(x).topk(2)
        gates = torch.zeros_like(experts.router(x)).scatter(-1, chosen, best.softmax(-1))
        each = zip(experts.gate, experts.up, experts.down, strict=True)
        outputs = [(torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T for gate, up, down in each]
        return (torch.stack(outputs, -1) * gates[..., None, :]).sum(-1)

    return weights(FOLDER / "08_expert.py", steps, lambda m: setattr(m.Experts, "forward", forward), experts=6, clip=0.3)


FOLDED = [  # ranks, pp, cp, tp, m, ep
    (2, 1, 1, 1, 1, 2),
    (3, 1, 1, 1, 2, 3),
    (4, 2, 1, 1, 3, 2),
    (4, 1, 1, 2, 1, 1),
    (8, 1, 2, 2, 2, 2),
]


EXPERTS = [(plan, tuple(STEPS[6:])) for plan in FOLDED]
FEW = [EXPERTS[1], (FOLDED[-1], (STEPS[-1],))]


@pytest.mark.parametrize(("plan", "paths"), matrix(EXPERTS + FEW[1:], FEW))
def test_experts_on_a_mesh_of_their_own_are_one_process(plan, paths):
    n, pp, cp, tp, m, ep = plan
    with mr.World(1) as world:
        alone = world.run(mixed)[0]
    sizes = {"pp": pp, "cp": cp, "tp": tp, "micro": m, "ep": ep, "experts": 6, "clip": 0.3}
    with mr.World(n) as world:
        for path in paths:
            for rank, own in enumerate(world.run(weights, path, **sizes)):
                for name, tensor in own.items():
                    dim = CUT.get(name.split(".")[-2])
                    part = alone[name] if dim is None else alone[name].chunk(tp, dim)[rank % tp]
                    part = part.chunk(ep)[rank % ep] if part.dim() == 3 else part
                    assert (tensor - part).abs().max() < 1e-9, (path.stem, rank, name)


@pytest.mark.parametrize(("experts", "ep"), [(4, 4), (5, 2)])
def test_experts_that_ranks_cannot_share_are_refused(experts, ep):
    with mr.World(2) as world, pytest.raises(mr.RankFailed, match=f"ep={ep}: use a divisor of experts and of 2 ranks"):
        world.run(weights, STEPS[6], 1, experts=experts, ep=ep)


def clipped(path: Path, clip: float) -> dict[str, torch.Tensor]:
    """The first script's weights if every gradient is clipped before the optimizer's step."""
    step = torch.optim.AdamW.step

    def clipping(optimizer):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        return step(optimizer)

    torch.optim.AdamW.step = clipping
    try:
        return weights(path)
    finally:
        torch.optim.AdamW.step = step


def test_clipping_is_by_the_norm_over_all_axes():
    with mr.World(1) as world:
        alone = world.run(clipped, FIRST, 0.3)[0]
    with mr.World(4) as world:
        for path, plan in ((STEPS[4], {"pp": 2}), (STEPS[5], {"cp": 2})):
            found = by_name(world.run(weights, path, tp=2, micro=2, clip=0.3, **plan), plan.get("pp", 1), 2)
            assert max((found[name] - alone[name]).abs().max().item() for name in alone) < 1e-9, path.stem


def shards_only(path: Path) -> None:
    """Builds the units, and checks what they keep when they're free."""

    def change(module):
        made = module.Unit.__init__

        def init(unit, *args):
            made(unit, *args)
            kept = [value for value in vars(unit).values() if isinstance(value, torch.Tensor)]
            assert {tensor.untyped_storage().nbytes() for tensor in kept} == {0, unit.shard.nbytes}

        module.Unit.__init__ = init

    weights(path, 0, change)


def test_a_unit_keeps_no_more_than_its_shard():
    with mr.World(2) as world:
        for path in STEPS[1:]:
            world.run(shards_only, path)


BUGS = [  # a line, the line with a bug, the plan, and what is said
    (
        'if "tp" in sums_over(p):',
        'if "tp" in sums_over(p) and p.dim() > 1:',
        {"cp": 2, "tp": 2},
        "1.norm1.weight differs over tp",
    ),
    ('Unit(part, groups["data"])', 'Unit(part, groups["dp"])', {"cp": 2, "tp": 2}, "0.weight differs over cp"),
    ('"data": ranks.flatten(1, 2).mT', '"data": ranks.mT', {"cp": 2}, "0.weight differs over dp"),
    (
        'dist.all_reduce(p.grad, group=self.groups["replicas"])',
        "pass",
        {"experts": 4, "ep": 2},
        "1.mlp.gate differs over replicas",
    ),
]


def test_copies_that_differ_are_named(tmp_path):
    with mr.World(4) as world:
        for right, wrong, plan, said in BUGS:
            text = ND.read_text(encoding="utf-8")
            assert text.count(right) == 1
            (tmp_path / "script.py").write_text(text.replace(right, wrong), encoding="utf-8")
            with pytest.raises(mr.RankFailed, match=said):
                world.run(weights, tmp_path / "script.py", 1, **plan)


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    with mr.World(1) as world, pytest.raises(mr.RankFailed, match="hidden=44, heads=4: use a multiple of 8, and of 2"):
        world.run(weights, ND, 1, hidden=44)


@pytest.mark.parametrize(("tp", "sizes"), [(2, {"kv_heads": 1}), (2, {"seq": 25}), (2, {"ffn": 51})])
def test_layers_that_ranks_cannot_split_are_refused(tp, sizes):
    with mr.World(2) as world, pytest.raises(mr.RankFailed, match="tp=2: choose a divisor of heads, kv_heads, ffn and seq"):
        world.run(weights, STEPS[4], 1, tp=tp, **sizes)


@pytest.mark.parametrize(("cp", "tp", "seq", "least"), [(2, 1, 26, 4), (4, 1, 20, 8), (2, 2, 12, 8), (1, 2, 25, None)])
def test_sequences_that_ranks_cannot_split_are_refused(cp, tp, seq, least):
    said = f"seq={seq}, cp={cp}, tp={tp}: use a multiple of {least}" if least else "tp=2: choose a divisor of"
    with mr.World(cp * tp) as world, pytest.raises(mr.RankFailed, match=said):
        world.run(weights, STEPS[5], 1, cp=cp, tp=tp, seq=seq)


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


def test_recomputation_needs_less_memory():
    with mr.World(2) as world:
        keeps, recomputes = (world.measure(weights, path, 1, memory=True).peak_bytes[0] for path in STEPS[1:3])
    assert recomputes < 0.8 * keeps


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


def saving(folder: Path, dies: int | None = None, **sizes) -> tuple[list[torch.Tensor], dict]:
    """This rank's losses and weights of two steps, each of which is saved; rank 1 may die in the middle of a save."""
    losses: list[torch.Tensor] = []

    def change(module):
        run, save = module.run, torch.save

        def recorded(*args):
            losses.append(run(*args))
            return losses[-1]

        def half(state, file):
            save(state, file)
            if state["step"] == dies:
                os.truncate(file, 1000)
                os.kill(os.getpid(), signal.SIGKILL)

        module.run = recorded
        if dies and torch.distributed.get_rank() == 1:
            torch.save = half

    plan = {"pp": 2, "cp": 2, "micro": 2, "experts": 4, "ep": 2, "clip": 0.3} | sizes
    found = weights(FAILURES, 2, change, folder=str(folder), every=1, **plan)
    return losses, found


def truncate(folder: Path) -> None:
    os.truncate(folder / "1.pt", (folder / "1.pt").stat().st_size // 2)


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "3.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "3.pt").write_bytes(data)


def damage_the_index(folder: Path) -> None:
    data = (folder / "0.pt").read_bytes()
    (folder / "0.pt").write_bytes(data.replace(b"PK\1\2", b"PK\1\3"))


def lose_a_part(folder: Path) -> None:
    (folder / "2.pt").unlink()


def lose_the_mark(folder: Path) -> None:
    (folder / "complete").unlink()


def test_a_run_resumes_from_its_last_whole_checkpoint_to_the_bit(tmp_path):
    with mr.World(4) as world:
        whole = world.run(saving, tmp_path / "whole")

        def resumes_after(step: int) -> None:
            for (losses, found), (all_losses, wanted) in zip(world.run(saving, tmp_path / "killed"), whole, strict=True):
                assert [*map(float, losses)] == [*map(float, all_losses[step:])]
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)

        with pytest.raises(mr.RankDied):
            world.run(saving, tmp_path / "killed", dies=2)
        resumes_after(1)
        resumes_after(2)  # what was saved in place of the half is whole
        for damage in (truncate, flip_a_bit, damage_the_index, lose_a_part, lose_the_mark):
            damage(tmp_path / "killed" / "000002")
            resumes_after(1)
        with pytest.raises(mr.RankFailed, match=r"000002 has \{'micro': 2\}: use the same, or another"):
            world.run(saving, tmp_path / "killed", micro=1)
    with mr.World(2) as world, pytest.raises(mr.RankFailed, match=r"000002 has \{.*'ranks': 4"):
        world.run(saving, tmp_path / "killed", pp=1)


def as_torchrun_starts_it(port: int, said: Path, script: Path, *flags: str) -> None:
    """Runs the script here, as in a process that torchrun has started. Rank 0 adds what it prints to a file."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv = [str(script), *flags]
    with said.open("a") as file, redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")


def on_ranks(said: Path, script: Path, *flags: str) -> bool:
    """Runs the script on two ranks, and adds what rank 0 prints to a file. Returns whether it came to its end."""
    try:
        with mr.World(2) as world:
            world.run(as_torchrun_starts_it, free_port(), said, script, *flags)
    except mr.RankDied:
        return False
    return True


def under_torchrun(said: Path, script: Path, *flags: str) -> bool:
    """Does as on_ranks does, by the command that the script's first lines show."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *flags]
    with said.open("a") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, timeout=120).returncode == 0


@pytest.mark.filterwarnings("ignore:.*the group was destroyed")  # the script ends torchrun's
@pytest.mark.parametrize("start", matrix([on_ranks, under_torchrun], [on_ranks]))
def test_the_script_starts_as_torchrun_starts_it_and_goes_on_when_started_again(start, tmp_path):
    line = "        model.finish(config.clip)\n"
    dies = line + "        if step == 3 and dist.get_rank() == 1:\n            os.kill(os.getpid(), 9)\n"
    text = FAILURES.read_text(encoding="utf-8")
    assert text.count(line) == 1
    (tmp_path / "dies.py").write_text(text.replace(line, dies), encoding="utf-8")
    flags = ["--steps", "5", "--cp", "2", "--micro", "3", "--folder", str(tmp_path / "saved"), "--every", "2"]
    assert not start(tmp_path / "said", tmp_path / "dies.py", *flags)
    assert start(tmp_path / "said", FAILURES, *flags)
    first, second = (tmp_path / "said").read_text().splitlines()
    assert first.startswith("step 0: loss 5.5")
    assert second.startswith("step 2: loss ")
