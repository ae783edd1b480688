"""Where a layer's activations wait: the theory's groups and splits, and real tensors that travel to the host and back."""

import contextlib
from functools import partial

import pytest
import torch

from manyranks import theory, training
from manyranks.parallel.activation_offload import HostMemory, offload_modules
from manyranks.parallel.checkpointing import checkpoint, checkpoint_modules
from manyranks.theory import offloading

LLAMA, PLAN, H100 = theory.models["llama3-8b"], theory.Plan(seq=8192, recompute="none"), theory.clusters["h100-dgx"]
LIKE_LLAMA = ("llama", "yi-", "mistral-", "qwen2-", "gemma-")
FOUND = offloading.groups(LLAMA, PLAN, H100)
SECONDS, UNIT = offloading.forward_seconds(LLAMA, PLAN, H100), FOUND[0].bytes
CONFIG = training.GPTConfig(layers=3, hidden=64, heads=4, kv_heads=2, ffn=224, seq=32)


def is_layer(module):
    return isinstance(module, training.gpt.Layer)


def step(change=lambda gpt: None):
    """The gradients of one step of a small GPT in 16 bits, with fused kernels."""
    gpt = training.GPT(CONFIG).bfloat16()
    for layer in gpt.layers:
        training.fuse(layer)
    change(gpt)
    tokens = torch.arange(66).view(2, 33)
    training.gpt.loss(gpt(tokens[:, :-1]), tokens[:, 1:]).backward()
    return [p.grad for p in gpt.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_what_travels_comes_back_in_time_and_changes_no_gradient(recompute):
    memory, ahead = HostMemory(), []

    def change(gpt):
        for layer in gpt.layers:
            layer.register_full_backward_hook(
                lambda *_: ahead.append([event.call for event in memory.events if event.way == "in"])
            )
        if recompute:
            checkpoint_modules(gpt, is_layer, checkpoint)
        offload_modules(gpt, is_layer, memory)

    for ours, plain in zip(step(change), step(), strict=True):
        assert torch.equal(ours, plain)
    plan = theory.Plan(seq=32, microbatch=2, batch=2, recompute="full" if recompute else "none")
    each = theory.memory.layer_activations(CONFIG.shape(), plan)
    assert [event[1:] for event in memory.events if event.way == "in"] == [(2, each), (1, each), (0, each)], "in time, once"
    assert ahead == [[2, 1], [2, 1, 0], [2, 1, 0]], "while a layer's backward runs, those of the layer before are on their way"
    for call in range(3):
        assert sum(event.bytes for event in memory.events if event[:2] == ("out", call)) == each


def test_a_part_of_a_storage_comes_back_as_that_part():
    x, half = torch.randn(512, requires_grad=True), lambda x: x.exp()[256:].sin().sum()
    (ours,), (plain,) = (torch.autograd.grad(run(x), [x]) for run in (HostMemory().offloaded(half, set()), half))
    assert torch.equal(ours, plain)


def test_small_tensors_and_parameters_stay():
    memory = HostMemory(least=10**9)
    step(partial(offload_modules, which=is_layer, memory=memory))
    assert memory.events == []


def twice():
    gpt = training.GPT(CONFIG)
    offload_modules(gpt, is_layer, HostMemory())
    loss = gpt(torch.arange(64).view(2, 32)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def chosen(*kinds):
    offload_modules(training.GPT(CONFIG), lambda module: isinstance(module, kinds), HostMemory())


REFUSED = {
    "nothing to offload": chosen,
    "'layers.0.mlp' lies in another": lambda: chosen(training.gpt.Layer, training.gpt.MLP),
    "without retain_graph": twice,
    "layers as Llama's": lambda: offloading.groups(theory.models["mixtral-8x7b"], PLAN, H100),
    "recompute='none'": lambda: offloading.groups(LLAMA, theory.Plan(seq=8192, recompute="full"), H100),
    "must stay": lambda: offloading.best(FOUND, UNIT / 2, SECONDS, 0),
    "0 or more": lambda: offloading.best(FOUND, -1.0, SECONDS, 64e9),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_offloaded_is_refused(said):
    with pytest.raises((ValueError, RuntimeError), match=said):
        REFUSED[said]()


def test_models_with_layers_as_llama_s_are_taken_apart_whole_and_others_refused():
    for name, shape in theory.models.items():
        found = []
        with contextlib.suppress(ValueError):
            found = offloading.groups(shape, PLAN, H100)
        assert bool(found) == name.startswith(LIKE_LLAMA), name
        assert not found or sum(group.bytes for group in found) == theory.memory.layer_activations(shape, PLAN)


@pytest.mark.parametrize("bandwidth", [0.0, 16e9, 64e9, 450e9])
@pytest.mark.parametrize("units", [17.2, 12, 8, 4, 1])
def test_the_best_split_is_no_slower_than_any_other(bandwidth, units):
    """Against every choice of whole groups to compute again, the rest of the bytes sent to the host."""
    split = offloading.best(FOUND, units * UNIT, SECONDS, bandwidth)
    over = max(0.0, sum(group.bytes for group in FOUND) - units * UNIT)
    assert split.kept + split.recomputed + split.offloaded == pytest.approx(sum(group.bytes for group in FOUND))
    for chosen in range(2 ** (len(FOUND) - 1)):
        again = [group for k, group in enumerate(FOUND[1:]) if chosen >> k & 1]
        away = over - sum(group.bytes for group in again)
        waits = max(0.0, away / bandwidth - SECONDS) if bandwidth else 0.0
        if away <= 0 or bandwidth:
            assert split.seconds <= sum(group.seconds for group in again) + waits + 1e-9
