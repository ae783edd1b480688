"""Every axis applied to the small GPT, which knows of none of them."""

from manyranks.parallel import tensor
from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.context import ContextParallel
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.mesh import Here, Mesh
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.schedules import Schedule
from manyranks.parallel.pipeline.split import Stage, dealt
from manyranks.theory import stages
from manyranks.theory.nd.holds import unplaced
from manyranks.theory.plan import Plan
from manyranks.training.config import TrainingConfig
from manyranks.training.gpt import GPT, CausalAttention, Layer
from manyranks.training.spread import Parts, Spread, Wrapper
from manyranks.training.tensor_styles import styles

_AGAIN = {"none": (), "selective": CausalAttention, "full": Layer}  # by TrainingConfig.recompute


def parallelize(
    model: GPT,
    training: TrainingConfig,
    wrapper: Wrapper = OverlappedDataParallel,
    group: Group = None,
    here: Here | None = None,
) -> Spread:
    """Puts the model on this rank, in place, with AdamW.

    model: the whole GPT, the same on every rank
    training: how it is trained, and the plan
    group: the ranks that train it, None for all
    here: this rank's place in the mesh of training.plan; None without a plan, when the group's
        ranks share each batch
    wrapper: what averages gradients where nothing is sharded

    Raises ValueError for sharding without ranks, and for a wrapper with sharding.
    """
    own, plan = Parts(model, here), training.plan or Plan()
    if plan.tp > 1:
        how = {"sequence_parallel": plan.sequence_parallel, "regather": plan.regather}
        own.tensor = tensor.parallelize(model, here.device_mesh, styles(model.config), **how)
    if plan.cp > 1:
        core, ring = "layers.*.attention.core", here.group("cp")
        own.context = ContextParallel(model, core, ring, plan.context)
    if plan.ep > 1 or (here and here.mesh.etp):
        own.experts = _experts(model, plan, here)
    # Before ZeRO-3, so that a module's hooks, which gather it, run around its checkpoint.
    checkpoint_modules(model, lambda module: isinstance(module, _AGAIN[training.recompute]))
    own.note_names()
    if plan.pp > 1:
        own.take_stages(_stages(model, plan, own.context), schedule(plan))
    return Spread(own, training, wrapper, here.group("data") if here else group)


def _experts(model: GPT, plan: Plan, here: Here) -> ExpertParallel:
    """Puts experts on their own axes where the mesh has etp, else on the data-parallel ranks."""
    axes = ("ep_replicas", "ep", "etp")[: 3 if here.mesh.etp else 2]
    mesh = here.plane(*axes, ep_replicas="replicas", ep="experts", etp="tensor")
    how = {"reduces": plan.zero == 0, "same_tokens": not plan.sequence_parallel and plan.tp > 1}
    return ExpertParallel(model, group=here.group("data"), mesh=mesh, **how)


def _stages(model: GPT, plan: Plan, context: ContextParallel | None) -> list[Stage]:
    """Deals the model into its stages, of as many layers as the theory's."""
    sizes = [
        stage.layers + stage.embedding + stage.head
        for stage in stages.deal_stages(model.config.shape(), plan.stages, plan.embedding_slots)
    ]
    device = next(model.parameters()).device
    return dealt(model, sizes, [context.positions(plan.seq).to(device)] if context else [])


def mesh_of(plan: Plan) -> Mesh:
    """Makes a plan's mesh. Experts have their own axes where theory.nd has no place for them."""
    etp = plan.expert_tp if unplaced(plan) else None
    return Mesh(plan.dp, plan.pp, plan.cp, plan.tp, plan.ep, plan.dp_shard, etp=etp)


def schedule(plan: Plan) -> Schedule:
    """Returns the schedule that a plan names, for its ranks and micro-batches."""
    name = "interleaved" if plan.virtual > 1 else plan.schedule
    return schedules.named(name, plan.pp, plan.microbatches, plan.virtual)
