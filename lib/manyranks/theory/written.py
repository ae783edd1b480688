"""A plan in words, and the commands that run it with Megatron-Core and torchtitan.

Flags as of November 2026. Sources: Megatron-LM, docs/user-guide/parallelism-guide.md, configuration-errors.md,
features/megatron_fsdp.md and pipeline_parallel_layout.md; torchtitan, config/parallelism.py, training.py and validation.py.
"""

import math
from collections.abc import Iterator

from manyranks.theory import checks, pipeline, stages, tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import Plan

# Fields for which no flag is given here: each has to be Plan's default.
_NO_FLAG = ("reshard_after_forward", "precision", "overlap", "overlap_tensor", "flash", "offload", "offload_layers", "regather")
_CP_COMM = {"ring": "p2p", "all-gather": "all_gather", "ulysses": "a2a"}
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
# Classes of torch.distributed.pipelining without "Schedule"; interleaving is another class.
_TITAN_SCHEDULES = {row["name"]: row["torchtitan"] for row in tables.rows("schedules") if row["torchtitan"]}


def degrees(plan: Plan) -> str:
    """Writes "TP 8, CP 2, PP 16, EP 8, DP 64": those above 1, and ETP where it is not TP; DP 4 × 16 is HSDP."""
    replicas = plan.dp // (plan.dp_shard or plan.dp)
    data = f"{replicas} × {plan.dp_shard}" if replicas > 1 else f"{plan.dp}"
    named = {"TP": plan.tp, "CP": plan.cp, "PP": plan.pp, "EP": plan.ep}
    used = [f"{name} {degree}" for name, degree in named.items() if degree > 1]
    folded = [f"ETP {plan.expert_tp}"] if plan.expert_tp != plan.tp else []
    return ", ".join([*used, *folded, f"DP {data}"])


def kept(plan: Plan) -> str:
    """Writes how a pipeline runs, what is sharded, b, and what is computed again: "ZB-V, ZeRO-1, b 2, recompute none"."""
    virtual = f" v {plan.virtual}" if plan.virtual > 1 else ""
    turns = f"{pipeline.WRITTEN[plan.schedule]}{virtual}, " if plan.pp > 1 else ""
    return f"{turns}ZeRO-{plan.zero}, b {plan.microbatch}, recompute {plan.recompute}"


def megatron_core(shape: ModelShape, plan: Plan) -> str:
    """Writes the command that runs a plan with Megatron-Core's pretrain_gpt.py.

    $LAUNCH, $MODEL and $DATA stand for the reader's own flags. A comment above says what the flags can't.
    Raises ValueError, naming the field, for a plan that Megatron-Core doesn't run, and for one that doesn't fit the shape.
    """
    flags = [*_megatron_axes(shape, plan), *_megatron_states(plan), *_megatron_recompute(shape, plan)]
    notes = _for_another(plan, "megatron-core")
    if plan.recompute == "selective" and shape.gated and shape.moe_layers < shape.layers:
        notes.append("Dense layers keep the product of their gated MLP: no flag computes it alone again, so a GPU holds more.")
    if "--use-megatron-fsdp" in flags:
        notes.append("Unset CUDA_DEVICE_MAX_CONNECTIONS, or Megatron-FSDP overlaps nothing.")
    elif plan.tp * plan.cp > 1:
        notes.append("On GPUs before Blackwell: export CUDA_DEVICE_MAX_CONNECTIONS=1, or Megatron-Core stops.")
    return _command(plan, "pretrain_gpt.py $MODEL $DATA", flags, notes)


def torchtitan(shape: ModelShape, plan: Plan) -> str:
    """Writes the command that runs a plan with torchtitan, whose configuration has the model.

    $LAUNCH and $CONFIG stand for the reader's own flags, as --module llama3 --config llama3_70b. A comment above says what the
    flags can't.
    Raises ValueError, naming the field, for a plan that torchtitan doesn't run, and for one that doesn't fit the shape.
    """
    flags = [*_titan_axes(shape, plan), *_titan_pipeline(shape, plan), *_titan_states(plan)]
    flags += ["--compile.enable", f"activation-checkpoint:{plan.recompute}"]  # what follows this word belongs to it
    notes = _for_another(plan, "torchtitan")
    if plan.cp > 1:
        notes.append("Context parallelism also needs ContextParallelTransform in the configuration.")
    if plan.pp > 1 and not _by_layers_per_stage(shape, plan):
        uneven = f"{shape.layers} layers on {plan.stages} stages"
        notes.append(f"{uneven}: list each stage's in parallelism.pipeline_parallel_module_fqns_per_model_part.")
    return _command(plan, "-m torchtitan.train $CONFIG", flags, notes)


def _for_another(plan: Plan, stack: str) -> list[str]:
    """Returns a note where the plan was made for another stack."""
    if plan.stack.startswith(stack):
        return []
    return [f"Planned for {plan.stack}: with stack={stack!r}, time and memory differ, and another plan may be better."]


def _command(plan: Plan, program: str, flags: list[str], notes: list[str]) -> str:
    ranks, far = plan.gpus, "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
    launch = f"; on nodes of 8:\n# LAUNCH='--nnodes {ranks // 8} --nproc-per-node 8 {far}'" if ranks % 8 == 0 else ""
    lines = [f"# {each}" for each in (f"{ranks:,} ranks{launch}", *notes)]
    return "\n".join([*lines, " \\\n  ".join([f"torchrun $LAUNCH {program}", *flags])])


def _check(shape: ModelShape, plan: Plan) -> None:
    checks.kinds(shape=shape, plan=plan)
    plan.check(shape)
    for name in _NO_FLAG:
        if (value := getattr(plan, name)) != (usual := getattr(Plan, name)):
            raise ValueError(f"{name}={value!r}: commands are written for {name}={usual!r} only")


def _megatron_axes(shape: ModelShape, plan: Plan) -> Iterator[str]:
    _check(shape, plan)
    yield f"--tensor-model-parallel-size {plan.tp}"
    if plan.tp > 1 and plan.sequence_parallel:
        yield "--sequence-parallel"
    yield f"--pipeline-model-parallel-size {plan.pp}"
    yield from _megatron_stages(shape, plan)
    yield f"--context-parallel-size {plan.cp}"
    if plan.cp > 1:
        yield f"--cp-comm-type {_CP_COMM[plan.context]}"
    if shape.experts:
        yield f"--expert-model-parallel-size {plan.ep}"
        yield f"--expert-tensor-parallel-size {plan.expert_tp}"
        yield "--moe-token-dispatcher-type alltoall"
    yield f"--seq-length {plan.seq}"
    yield f"--micro-batch-size {plan.microbatch}"
    yield f"--global-batch-size {plan.batch}"


def _megatron_stages(shape: ModelShape, plan: Plan) -> Iterator[str]:
    """Yields how layers lie on stages: by their number where all have as many, by a layout elsewhere."""
    if plan.pp == 1:
        return
    if plan.schedule not in ("1f1b", "interleaved"):
        raise ValueError(f"schedule={plan.schedule!r}: Megatron-Core has 1F1B, plain and interleaved")
    if plan.virtual > 1 and plan.microbatches % plan.pp:
        many = f"{plan.microbatches} micro-batches, no multiple of pp={plan.pp}"
        raise ValueError(f"virtual={plan.virtual} with {many}: Megatron-Core interleaves whole groups of pp only")
    dealt = stages.deal_stages(shape, plan.stages, plan.embedding_slots, shape.mtp_depth)
    if len({stage.layers for stage in dealt}) > 1:
        layers = ("E" * one.embedding + f"t*{one.layers}" * (one.layers > 0) + "m" * one.mtp + "L" * one.head for one in dealt)
        yield f"--pipeline-model-parallel-layout '{'|'.join(layers)}'"
    elif plan.virtual > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {plan.virtual}"


def _megatron_states(plan: Plan) -> Iterator[str]:
    yield "--bf16"
    yield "--grad-reduce-in-bf16"
    sharded = plan.dp * plan.cp > 1
    if plan.dp_shard not in (None, plan.dp):
        yield f"--num-distributed-optimizer-instances {plan.dp // plan.dp_shard}"
    if plan.zero and sharded:
        yield "--use-distributed-optimizer"
    if plan.zero < 2 and sharded:
        yield from ("--overlap-grad-reduce", "--overlap-param-gather")[: 1 + plan.zero]
    elif sharded:
        if plan.pp > 1:
            # "Mutually exclusive in Megatron's standard path": NVIDIA/Megatron-LM pull request 6081.
            raise ValueError(f"zero={plan.zero} with pp={plan.pp}: Megatron-FSDP has no pipelines; take ZeRO-1, or pp=1")
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {_SHARDING[plan.zero]}"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"


def _megatron_recompute(shape: ModelShape, plan: Plan) -> Iterator[str]:
    if plan.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif plan.recompute == "selective":
        again = {"layernorm": shape.norm == "rmsnorm", "moe_act": shape.experts and shape.gated, "mla_up_proj": shape.latent}
        if modules := [name for name, used in again.items() if used]:
            yield "--recompute-granularity selective"
            yield f"--recompute-modules {' '.join(modules)}"


def _titan_axes(shape: ModelShape, plan: Plan) -> Iterator[str]:
    _check(shape, plan)
    yield f"--parallelism.tensor_parallel_degree {plan.tp}"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "--parallelism.no-enable-sequence-parallel"
    yield f"--parallelism.context_parallel_degree {plan.cp}"
    if shape.experts:
        if plan.expert_tp > 1:
            raise ValueError(f"experts cut over {plan.expert_tp} ranks: torchtitan keeps each whole; give etp=1")
        if plan.ep < plan.tp:
            raise ValueError(f"ep={plan.ep} with tp={plan.tp}: torchtitan's ep is at least its tp")
        yield f"--parallelism.expert_parallel_degree {plan.ep}"
    yield f"--training.max_context_length {plan.seq}"
    yield f"--training.num_tokens_per_microbatch_per_dp_rank {plan.microbatch * plan.seq}"
    yield f"--training.num_tokens_per_train_step {plan.tokens}"


def _titan_pipeline(shape: ModelShape, plan: Plan) -> Iterator[str]:
    if plan.pp == 1:
        return
    if plan.schedule not in _TITAN_SCHEDULES or plan.embedding_slots:
        what = "embedding_slots=True" if plan.schedule in _TITAN_SCHEDULES else f"schedule={plan.schedule!r}"
        raise ValueError(f"{what}: no flags of torchtitan's do this")
    m = plan.microbatches
    if plan.virtual > 1 and m % max(1, m // plan.pp):
        raise ValueError(f"virtual={plan.virtual} with {m} micro-batches: PyTorch interleaves m // pp equal rounds only")
    yield f"--parallelism.pipeline_parallel_degree {plan.pp}"
    yield f"--parallelism.pipeline_parallel_schedule {_TITAN_SCHEDULES['interleaved' if plan.virtual > 1 else plan.schedule]}"
    if _by_layers_per_stage(shape, plan):
        yield f"--parallelism.pipeline_parallel_layers_per_stage {math.ceil(shape.layers / plan.stages)}"
        yield "--parallelism.pipeline_parallel_first_stage_less_layers 0"
        yield "--parallelism.pipeline_parallel_last_stage_less_layers 0"
    yield f"--parallelism.num_pp_microbatches {m}"


def _by_layers_per_stage(shape: ModelShape, plan: Plan) -> bool:
    """Returns whether torchtitan, which counts stages by the layers of the largest, comes to as many."""
    return math.ceil(shape.layers / math.ceil(shape.layers / plan.stages)) == plan.stages


def _titan_states(plan: Plan) -> Iterator[str]:
    shards = plan.dp_shard or plan.dp
    if plan.zero == 0:
        if plan.cp > 1:
            raise ValueError(f"zero=0 with cp={plan.cp}: torchtitan shards states over context-parallel ranks; take ZeRO-3")
        shards = 1
    elif plan.zero == 1 and plan.shards > 1:
        raise ValueError("zero=1: torchtitan shards gradients and parameters, too; take ZeRO-3")
    yield f"--parallelism.data_parallel_replicate_degree {plan.dp // shards}"
    yield f"--parallelism.data_parallel_shard_degree {shards}"
    if plan.zero > 1:
        yield f"--parallelism.fsdp_reshard_after_forward {'always' if plan.zero == 3 else 'never'}"
