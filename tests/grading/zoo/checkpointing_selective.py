"""Wrong answers to the third task of 04_checkpointing: only attention's core again."""

from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "selective"
MORE = "Only the core runs again"
KEPT = []


@wrong(TASK, "the core has to run again: its scores", right_values=True)
def does_nothing(checkpoint, layer, x):
    return layer.output(layer.core(layer.project(x)))


@wrong(TASK, MORE, right_values=True)
def checkpoints_the_whole_layer(checkpoint, layer, x):
    return checkpoint(lambda x: layer.output(layer.core(layer.project(x))), x)


@wrong(TASK, MORE, right_values=True)
def checkpoints_each_part(checkpoint, layer, x):
    for part in (layer.project, layer.core, layer.output):
        x = checkpoint(part, x)
    return x


@wrong(TASK, MORE, right_values=True)
def checkpoints_the_products(checkpoint, layer, x):
    return checkpoint(layer.output, layer.core(checkpoint(layer.project, x)))


@wrong(TASK, MORE, right_values=True)
def begins_too_early(checkpoint, layer, x):
    return layer.output(checkpoint(lambda x: layer.core(layer.project(x)), x))


@wrong(TASK, MORE, right_values=True)
def ends_too_late(checkpoint, layer, x):
    return checkpoint(lambda x: layer.output(layer.core(x)), layer.project(x))


@wrong(TASK, "one run more is enough", right_values=True)
def nests(checkpoint, layer, x):
    return layer.output(checkpoint(lambda x: checkpoint(layer.core, x), layer.project(x)))


@wrong(TASK, "not its scores", right_values=True)
def keeps_the_first_run_too(checkpoint, layer, x):
    qkv = layer.project(x)
    KEPT.append([qkv.detach() @ qkv.detach().T])
    return layer.output(checkpoint(layer.core, qkv))


@wrong(TASK, "each once in forward")
def leaves_the_core_out(checkpoint, layer, x):
    return layer.output(layer.project(x)[:, : x.shape[1]])


@wrong(TASK, "each once in forward", right_values=True)
def projects_twice(checkpoint, layer, x):
    layer.project(x)
    return layer.output(checkpoint(layer.core, layer.project(x)))


@wrong(TASK, "the function's second x is not the first one")
def changes_the_cores_input(checkpoint, layer, x):
    qkv = layer.project(x).detach()
    context = checkpoint(layer.core, qkv.requires_grad_())
    qkv.data.mul_(0.5)
    return layer.output(context)


@wrong(TASK, "has no attribute 'parameters'")
def takes_the_layer_for_a_module(checkpoint, layer, x):
    _ = list(layer.core.parameters())
    return layer.output(checkpoint(layer.core, layer.project(x)))


@wrong(TASK, "is not allowed; ")
def uses_torchs_own(checkpoint, layer, x):
    from torch.utils.checkpoint import checkpoint as ready

    return layer.output(ready(layer.core, layer.project(x), use_reentrant=False))


@wrong(TASK, "is not allowed; ")
def uses_the_chapters_policy(checkpoint, layer, x):
    from manyranks.parallel.checkpointing import selective_checkpoint
    from manyranks.parallel.recompute_policy import weight_products

    return selective_checkpoint(weight_products, lambda x: layer.output(layer.core(layer.project(x))), x)


@wrong(TASK, "the check calls selective(checkpoint, layer, x)")
def takes_two_arguments(layer, x):
    return layer.output(layer.core(layer.project(x)))
