"""Plans in words and as commands: flags say the plan again, and what a framework doesn't run is refused in words."""

import math
import re
from itertools import product

import pytest

from manyranks.theory import Plan, clusters, planner, stages, written
from manyranks.theory.shapes import models

LLAMA, MIXTRAL, DEEPSEEK = (models[name] for name in ("llama3-70b", "mixtral-8x7b", "deepseek-v3"))
SIZES = {"seq": 8192, "batch": 512}
MEGATRON = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "cp": "context-parallel-size"}
MEGATRON |= {"seq": "seq-length", "microbatch": "micro-batch-size", "batch": "global-batch-size"}


def flags(command: str) -> dict[str, str]:
    """A command's flags with their values, "" for one that has none."""
    *_, line = command.replace(" \\\n", "").splitlines()
    return {name: value.strip("'") for name, value in re.findall(r" --(\S+)(?: ((?:(?!--)\S+ ?)+))?", line)}


def megatron(**fields) -> dict[str, str]:
    return {name: value.strip() for name, value in flags(written.megatron_core(LLAMA, Plan(**SIZES | fields))).items()}


def titan(shape=LLAMA, **fields) -> dict[str, str]:
    found = flags(written.torchtitan(shape, Plan(**SIZES | fields)))
    return {name.removeprefix("parallelism.").removeprefix("training."): value.strip() for name, value in found.items()}


AXES = [(dp, pp, cp, tp) for dp, pp, cp, tp in product((1, 4), (1, 4), (1, 2), (1, 8)) if dp * pp * cp * tp > 1]


@pytest.mark.parametrize(("dp", "pp", "cp", "tp"), AXES)
def test_flags_say_the_degrees_and_what_is_left_of_the_ranks_is_dp(dp, pp, cp, tp):
    plan = Plan(dp, pp, cp, tp, **SIZES, microbatch=2)
    command = written.megatron_core(LLAMA, plan)
    own = flags(command)
    assert {name: int(own[flag]) for name, flag in MEGATRON.items()} == {name: getattr(plan, name) for name in MEGATRON}
    assert ("sequence-parallel" in own) == (tp > 1)
    ranks = int(re.match(r"# (\d+) ranks", command)[1])
    assert ranks // (int(own[MEGATRON["tp"]]) * int(own[MEGATRON["pp"]]) * int(own[MEGATRON["cp"]])) == dp

    own = titan(dp=dp, pp=pp, cp=cp, tp=tp, microbatch=2, zero=3)
    degrees = [int(own.get(f"{name}_degree", 1)) for name in ("data_parallel_shard", "pipeline_parallel", "context_parallel")]
    assert [*degrees, int(own["tensor_parallel_degree"])] == [dp, pp, cp, tp]
    assert int(own["num_tokens_per_train_step"]) == plan.tokens
    each = int(own["num_tokens_per_microbatch_per_dp_rank"])
    assert each * int(own.get("num_pp_microbatches", plan.microbatches)) * dp == plan.tokens


def test_states_are_sharded_as_the_stage_says():
    assert "use-distributed-optimizer" not in megatron(dp=8, zero=0)
    assert {"use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather"} <= megatron(dp=8, zero=1).keys()
    for zero, strategy in ((2, "optim_grads"), (3, "optim_grads_params")):
        own = megatron(dp=8, zero=zero)
        assert own["data-parallel-sharding-strategy"] == strategy
        assert own["ckpt-format"] == "fsdp_dtensor"
    assert megatron(dp=8, dp_shard=2, zero=1)["num-distributed-optimizer-instances"] == "4"
    assert titan(dp=8, zero=3)["fsdp_reshard_after_forward"] == "always"
    assert titan(dp=8, zero=2)["fsdp_reshard_after_forward"] == "never"
    own = titan(dp=8, dp_shard=2, zero=3)
    assert (own["data_parallel_replicate_degree"], own["data_parallel_shard_degree"]) == ("4", "2")
    assert titan(dp=8, zero=0)["data_parallel_replicate_degree"] == "8"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation(recompute):
    assert written.torchtitan(LLAMA, Plan(recompute=recompute)).endswith(f" activation-checkpoint:{recompute}")
    own = megatron(recompute=recompute)
    assert own.get("recompute-granularity", "none") == recompute
    assert own.get("recompute-modules") == ("layernorm" if recompute == "selective" else None)
    deep = flags(written.megatron_core(DEEPSEEK, Plan(recompute="selective")))
    assert deep["recompute-modules"] == "layernorm moe_act mla_up_proj"


def laid(layout: str) -> list[int]:
    """Layers of each stage of Megatron-Core's layout."""
    return [int((re.search(r"t\*(\d+)", stage) or [0, 0])[1]) for stage in layout.split("|")]


@pytest.mark.parametrize("shape", [LLAMA, DEEPSEEK], ids=lambda shape: shape.name)
@pytest.mark.parametrize(("pp", "virtual", "slots"), [(4, 2, False), (8, 4, False), (4, 3, False), (16, 2, True)])
def test_layers_lie_on_megatron_s_stages_as_theory_deals_them(shape, pp, virtual, slots):
    plan = Plan(pp=pp, virtual=virtual, embedding_slots=slots, seq=4096, batch=64)
    own, wanted = flags(written.megatron_core(shape, plan)), stages.of_ranks(shape, plan)
    if layout := own.get("pipeline-model-parallel-layout"):
        each = laid(layout.strip("' "))
        assert "num-virtual-stages-per-pipeline-rank" not in own
        assert (layout.strip("' ")[0], layout.strip("' ")[-1]) == ("E", "L")
        assert layout.count("m") == (shape.mtp_depth > 0)
    else:
        each = [shape.layers // plan.stages] * plan.stages
        assert own["num-virtual-stages-per-pipeline-rank"].strip() == str(virtual)
    assert [sum(each[rank::pp]) for rank in range(pp)] == [stage.layers for stage in wanted]


def test_torchtitan_counts_stages_by_their_layers_or_the_reader_lists_them():
    own = titan(pp=4, virtual=3, zero=3)
    assert own["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert math.ceil(80 / int(own["pipeline_parallel_layers_per_stage"])) == 12
    command = written.torchtitan(LLAMA, Plan(pp=4, virtual=8, **SIZES))  # two or three layers on each
    assert "# 80 layers on 32 stages: list" in command
    assert "layers_per_stage" not in command


def test_experts():
    plan = Plan(dp=8, tp=2, ep=8, etp=1, zero=3, **SIZES)
    own = flags(written.megatron_core(MIXTRAL, plan))
    assert (own["expert-model-parallel-size"].strip(), own["expert-tensor-parallel-size"].strip()) == ("8", "1")
    assert titan(MIXTRAL, dp=8, tp=2, ep=8, etp=1, zero=3)["expert_parallel_degree"] == "8"


REFUSED = [
    (written.megatron_core, LLAMA, {"pp": 4, "dp": 2, "zero": 3}, "zero=3 with pp=4"),
    (written.megatron_core, LLAMA, {"pp": 4, "schedule": "zb-v"}, "schedule='zb-v'"),
    (written.megatron_core, LLAMA, {"pp": 4, "virtual": 2, "batch": 6}, "6 micro-batches"),
    (written.megatron_core, LLAMA, {"precision": "fp8"}, "precision='fp8'"),
    (written.megatron_core, LLAMA, {"ep": 2, "dp": 2}, "has no experts"),
    (written.torchtitan, LLAMA, {"dp": 8, "zero": 1}, "zero=1"),
    (written.torchtitan, LLAMA, {"cp": 2, "zero": 0}, "zero=0 with cp=2"),
    (written.torchtitan, LLAMA, {"pp": 4, "schedule": "dualpipe"}, "schedule='dualpipe'"),
    (written.torchtitan, LLAMA, {"pp": 4, "embedding_slots": True}, "embedding_slots=True"),
    (written.torchtitan, LLAMA, {"pp": 4, "virtual": 2, "batch": 9}, "9 micro-batches"),
    (written.torchtitan, MIXTRAL, {"dp": 2, "tp": 2, "zero": 3}, "experts cut over 2 ranks"),
    (written.torchtitan, MIXTRAL, {"dp": 2, "tp": 2, "etp": 1, "zero": 3}, "ep=1 with tp=2"),
]


@pytest.mark.parametrize(("write", "shape", "fields", "says"), REFUSED, ids=[f"{w.__name__}: {s}" for w, _, _, s in REFUSED])
def test_what_a_framework_does_not_run_is_refused_in_words(write, shape, fields, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        write(shape, Plan(**SIZES | fields))


def test_the_planner_s_best_plan_has_a_command_in_the_framework_it_was_asked_for():
    for stack, write, only in (
        ("megatron-core", written.megatron_core, {}),
        ("torchtitan-2025", written.torchtitan, {"zero": (2, 3)}),
    ):
        best = planner.search(LLAMA, clusters["h100-dgx"], gpus=64, **SIZES, stack=stack, **only)[0]
        assert write(LLAMA, best.plan).startswith("# 64 ranks; on nodes of 8:\n# LAUNCH='--nnodes 8 ")


NOTES = [
    (written.megatron_core, {"tp": 2}, "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
    (written.megatron_core, {"dp": 8}, ""),
    (written.megatron_core, {"dp": 8, "zero": 3}, "Unset CUDA_DEVICE_MAX_CONNECTIONS"),
    (written.megatron_core, {"dp": 8, "zero": 3, "stack": "torchtitan"}, "Planned for torchtitan"),
    (written.torchtitan, {"dp": 8, "zero": 3}, "Planned for megatron-core"),
    (written.torchtitan, {"dp": 8, "zero": 3, "stack": "torchtitan-2025"}, ""),
    (written.torchtitan, {"cp": 2, "zero": 3, "stack": "torchtitan-2025"}, "ContextParallelTransform"),
]


@pytest.mark.parametrize(("write", "fields", "says"), NOTES)
def test_what_no_flag_says_stands_above_in_a_note(write, fields, says):
    plan = Plan(**SIZES | {"recompute": "none"} | fields)
    notes = [
        line
        for line in write(LLAMA, plan).splitlines()
        if line.startswith("# ") and "rank" not in line and "LAUNCH" not in line
    ]
    assert bool(notes) == bool(says)
    assert says in "\n".join(notes)
