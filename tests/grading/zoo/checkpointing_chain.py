"""Wrong answers to the second task of 04_checkpointing: a chain in segments."""

import math
from functools import partial

from tests.grading.zoo.checkpointing_right import in_segments, in_turn, lengths_of
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "checkpoint_sqrt"
KEPT = []


def in_chunks(checkpoint, layers, x, size):
    """Segments of this size, and what is left."""
    ends = [*range(size, len(layers), size), len(layers)]
    lengths = [end - first for first, end in zip([0, *ends], ends, strict=False)]
    return in_segments(checkpoint, layers, x, lengths)


@wrong(TASK, "every segment but the last is one call of checkpoint", right_values=True)
def does_nothing(checkpoint, layers, x):
    return in_turn(layers, x)


@wrong(TASK, "leave it without a checkpoint", right_values=True)
def checkpoints_the_last_too(checkpoint, layers, x):
    return in_segments(checkpoint, layers, x, lengths_of(len(layers)), last=True)


@wrong(TASK, "leave it without a checkpoint", right_values=True)
def makes_one_checkpoint_of_all(checkpoint, layers, x):
    return checkpoint(partial(in_turn, layers), x)


@wrong(TASK, "leave it without a checkpoint", right_values=True)
def makes_every_layer_a_checkpoint(checkpoint, layers, x):
    for layer in layers:
        x = checkpoint(layer, x)
    return x


@wrong(TASK, "10 layers are 3 segments, round(√10), of 4, 3, 3 layers", right_values=True)
def makes_every_layer_but_the_last_a_checkpoint(checkpoint, layers, x):
    return in_segments(checkpoint, layers, x, [1] * len(layers))


@wrong(TASK, "of 4, 3, 3 layers", right_values=True)
def has_the_shorter_ones_first(checkpoint, layers, x):
    return in_segments(checkpoint, layers, x, lengths_of(len(layers))[::-1])


@wrong(TASK, "7 layers are 3 segments, round(√7), of 3, 2, 2 layers", right_values=True, cases=slice(None))
def rounds_down(checkpoint, layers, x):
    n, count = len(layers), math.isqrt(len(layers))
    return in_segments(checkpoint, layers, x, [n // count + (k < n % count) for k in range(count)])


@wrong(TASK, "of 4, 3, 3 layers", right_values=True)
def rounds_up(checkpoint, layers, x):
    n, count = len(layers), math.ceil(math.sqrt(len(layers)))
    return in_segments(checkpoint, layers, x, [n // count + (k < n % count) for k in range(count)])


@wrong(TASK, "10 layers are 3 segments, round(√10), of 4, 3, 3 layers", right_values=True)
def cuts_chunks_of_the_ceiling(checkpoint, layers, x):
    """4, 4 and 2 of 10."""
    return in_chunks(checkpoint, layers, x, -(-len(layers) // len(lengths_of(len(layers)))))


@wrong(TASK, "of 4, 3, 3 layers", right_values=True)
def cuts_chunks_of_the_floor(checkpoint, layers, x):
    """3, 3, 3 and 1."""
    return in_chunks(checkpoint, layers, x, len(layers) // len(lengths_of(len(layers))))


@wrong(TASK, "every layer computes once in forward: is one left out")
def leaves_the_rest_out(checkpoint, layers, x):
    count = len(lengths_of(len(layers)))
    return in_segments(checkpoint, layers, x, [len(layers) // count] * count)


@wrong(TASK, "every layer computes once in forward")
def leaves_the_last_out(checkpoint, layers, x):
    return in_segments(checkpoint, layers[:-1] or layers, x, lengths_of(len(layers[:-1]) or 1))


@wrong(TASK, "or in two segments")
def overlaps(checkpoint, layers, x):
    """A segment begins with the layer that ended the one before."""
    first = 0
    for k, length in enumerate(lengths_of(len(layers))):
        segment = layers[max(0, first - 1) : first + length]
        x = checkpoint(partial(in_turn, segment), x) if k < len(lengths_of(len(layers))) - 1 else in_turn(segment, x)
        first += length
    return x


@wrong(TASK, "a lambda in a loop sees its variables' last values")
def binds_late(checkpoint, layers, x):
    lengths = lengths_of(len(layers))
    for k, length in enumerate(lengths):
        segment, layers = layers[:length], layers[length:]
        x = checkpoint(lambda x: in_turn(segment, x), x) if k < len(lengths) - 1 else in_turn(segment, x)
    return x


@wrong(TASK, "layers run in their order, layers[0] first")
def begins_at_the_end(checkpoint, layers, x):
    return in_segments(checkpoint, layers[::-1], x, lengths_of(len(layers)))


@wrong(TASK, "a layer that backward runs twice is in a checkpoint within another", right_values=True)
def nests(checkpoint, layers, x):
    """Each layer of a segment is a checkpoint, too."""
    inner = [partial(checkpoint, layer) for layer in layers]
    ends = lengths_of(len(layers))
    return in_segments(checkpoint, [*inner[: sum(ends[:-1])], *layers[sum(ends[:-1]) :]], x, ends)


@wrong(TASK, "with N = 1 there is no checkpoint", right_values=True, cases=slice(None))
def checkpoints_a_single_layer(checkpoint, layers, x):
    return in_segments(checkpoint, layers, x, lengths_of(len(layers)), last=len(layers) == 1)


@wrong(TASK, "with N = 1 there is no checkpoint", right_values=True, cases=slice(None))
def takes_more_than_one_layer_for_granted(checkpoint, layers, x):
    lengths = lengths_of(len(layers))
    _ = lengths[1]
    return in_segments(checkpoint, layers, x, lengths)


@wrong(TASK, "what is kept: the inputs of the segments before the last", right_values=True)
def keeps_every_layers_output(checkpoint, layers, x):
    """In a list, beside."""

    return in_segments(checkpoint, [Keeping(layer) for layer in layers], x, lengths_of(len(layers)))


class Keeping:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        y = self.layer(x)
        KEPT.append(y)
        return y


@wrong(TASK, "one segment is computed again at a time", right_values=True)
def keeps_what_backward_computes(checkpoint, layers, x):
    """In a list; all right after forward."""
    return in_segments(checkpoint, [KeepingInBackward(layer) for layer in layers], x, lengths_of(len(layers)))


class KeepingInBackward(Keeping):
    def __init__(self, layer):
        super().__init__(layer)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        y = self.layer(x)
        if self.calls > 1:
            KEPT.append([y, x, y.detach().clone(), y.detach().clone()])
        return y


@wrong(TASK, "checkpoint(function, x): the function comes first")
def has_the_arguments_the_other_way_round(checkpoint, layers, x):
    for layer in layers[:-1]:
        x = checkpoint(x, layer)
    return layers[-1](x)


@wrong(TASK, "it returned a list")
def returns_a_list(checkpoint, layers, x):
    return [in_segments(checkpoint, layers, x, lengths_of(len(layers)))]


@wrong(TASK, "is not allowed; ")
def uses_torchs_own(checkpoint, layers, x):
    from torch.utils.checkpoint import checkpoint_sequential

    return checkpoint_sequential(layers, len(lengths_of(len(layers))), x, use_reentrant=False)


@wrong(TASK, "is not allowed; ")
def uses_the_chapters(checkpoint, layers, x):
    from manyranks.parallel.checkpointing import checkpoint_segments

    return checkpoint_segments(layers, x, len(lengths_of(len(layers))))


@wrong(TASK, "the check calls checkpoint_sqrt(checkpoint, layers, x)")
def takes_two_arguments(layers, x):
    return in_turn(layers, x)
