"""Wrong answers to the third task of 02_data_parallel: which gradients travel together."""

from tests.grading.zoo import gradients
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


def buckets_of(parameters, first, cap, size=lambda p: p.nbytes):
    buckets, held = [[]], 0
    for parameter in parameters:
        buckets[-1].append(parameter)
        held += size(parameter)
        if held >= (first if len(buckets) == 1 else cap):
            buckets.append([])
            held = 0
    return buckets if buckets[-1] else buckets[:-1]


def learning(parameters):
    return [parameter for parameter in parameters if parameter.requires_grad]


@wrong("cut", "cut returned a NoneType; hint: return the list of buckets")
def cut_nothing(parameters, first_bytes, cap_bytes):
    pass


@wrong("cut", "that is one bucket for all")
def cut_into_one(parameters, first_bytes, cap_bytes):
    return [learning(parameters)[::-1]]


@wrong("cut", "go through them in reverse")
def cut_forwards(parameters, first_bytes, cap_bytes):
    return buckets_of(learning(parameters), first_bytes, cap_bytes)


@wrong("cut", "frozen parameters get no gradient")
def cut_frozen_too(parameters, first_bytes, cap_bytes):
    return buckets_of(parameters[::-1], first_bytes, cap_bytes)


@wrong("cut", "that is the chapter's rule, at most so many bytes")
def cut_by_the_rule_of_the_chapter(parameters, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for parameter in reversed(learning(parameters)):
        if buckets[-1] and held + parameter.nbytes > (first_bytes if len(buckets) == 1 else cap_bytes):
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


@wrong("cut", "the first bucket has a limit of its own")
def cut_without_first_bytes(parameters, first_bytes, cap_bytes):
    return buckets_of(learning(parameters)[::-1], cap_bytes, cap_bytes)


@wrong("cut", "first_bytes is the limit of the first bucket alone")
def cut_with_first_bytes_only(parameters, first_bytes, cap_bytes):
    return buckets_of(learning(parameters)[::-1], first_bytes, first_bytes)


@wrong("cut", "the last bucket is missing")
def cut_without_the_last(parameters, first_bytes, cap_bytes):
    buckets, bucket = [], []
    for parameter in reversed(learning(parameters)):
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= (first_bytes if not buckets else cap_bytes):
            buckets.append(bucket)
            bucket = []
    return buckets


@wrong("cut", "an empty bucket would be an all-reduce of nothing")
def cut_with_an_empty_bucket(parameters, first_bytes, cap_bytes):
    return [*gradients.cut(parameters, first_bytes, cap_bytes), []]


@wrong("cut", "the limits are bytes, not elements")
def cut_by_elements(parameters, first_bytes, cap_bytes):
    return buckets_of(learning(parameters)[::-1], first_bytes, cap_bytes, lambda p: p.numel())


@wrong("cut", "an element has 8 bytes here, not 4")
def cut_as_if_float32(parameters, first_bytes, cap_bytes):
    return buckets_of(learning(parameters)[::-1], first_bytes, cap_bytes, lambda p: 4 * p.numel())


@wrong("cut", "exactly its number of bytes is closed, too: >=, not >")
def cut_with_more_than_the_limit(parameters, first_bytes, cap_bytes):
    return buckets_of(learning(parameters)[::-1], first_bytes + 1, cap_bytes + 1)


@wrong("cut", "each bucket counts its own bytes")
def cut_without_resetting_the_size(parameters, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for parameter in reversed(learning(parameters)):
        buckets[-1].append(parameter)
        held += parameter.nbytes
        if held >= (first_bytes if len(buckets) == 1 else cap_bytes):
            buckets.append([])
    return [bucket for bucket in buckets if bucket]


@wrong("cut", "the last parameter comes first within each, too")
def cut_in_the_order_of_the_model(parameters, first_bytes, cap_bytes):
    return [bucket[::-1] for bucket in gradients.cut(parameters, first_bytes, cap_bytes)]


@wrong("cut", "in the order in which they are filled")
def cut_last_bucket_first(parameters, first_bytes, cap_bytes):
    return gradients.cut(parameters, first_bytes, cap_bytes)[::-1]


@wrong("cut", "cut returned a list of lists of int")
def cut_into_sizes(parameters, first_bytes, cap_bytes):
    return [[p.nbytes for p in bucket] for bucket in gradients.cut(parameters, first_bytes, cap_bytes)]


@wrong("cut", "cut returned a generator")
def cut_lazily(parameters, first_bytes, cap_bytes):
    yield from gradients.cut(parameters, first_bytes, cap_bytes)


@wrong("cut", "in no bucket: ")
def cut_opening_the_next_too_late(parameters, first_bytes, cap_bytes):
    buckets, bucket, held = [], [], 0
    for parameter in reversed(learning(parameters)):
        if held >= (first_bytes if not buckets else cap_bytes):
            buckets.append(bucket)
            bucket, held = [], 0
            continue
        bucket.append(parameter)
        held += parameter.nbytes
    return [b for b in [*buckets, bucket] if b]


@wrong("cut", "a parameter is in two buckets")
def cut_putting_one_into_two_buckets(parameters, first_bytes, cap_bytes):
    buckets = gradients.cut(parameters, first_bytes, cap_bytes)
    return [[*before[-1:], *bucket] for before, bucket in zip([[], *buckets], buckets, strict=False)]


@wrong("cut", "cut has changed the list that it was given")
def cut_and_empty_the_list(parameters, first_bytes, cap_bytes):
    mine = list(parameters)
    parameters.clear()
    return gradients.cut(mine, first_bytes, cap_bytes)


@wrong(
    "cut",
    "that is the chapter's rule, at most so many bytes: here a bucket is closed once it has at least so many; an empty bucket",
)
def cut_by_the_rule_of_the_chapter_with_an_empty_bucket(parameters, first_bytes, cap_bytes):
    buckets = [[]]
    for parameter in reversed(learning(parameters)):
        held = sum(p.nbytes for p in buckets[-1])
        if held + parameter.nbytes > (first_bytes if len(buckets) == 1 else cap_bytes):
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


@wrong("cut", "gradients do not exist yet when buckets are cut: ask requires_grad")
def cut_asking_for_gradients(parameters, first_bytes, cap_bytes):
    return gradients.cut([p for p in parameters if p.grad is not None], first_bytes, cap_bytes)
