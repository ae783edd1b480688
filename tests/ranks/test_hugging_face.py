"""Models of transformers under each wrapper: LoRA through peft learns, and save_pretrained writes, what one process does."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist

from manyranks.parallel import FullyShardedDataParallel, OverlappedDataParallel, Zero3, ZeroOptimizer
from manyranks.parallel.expert import ExpertParallel, take_over
from manyranks.parallel.tensor.families import parallelize_transformers, with_linear
from tests.conftest import matrix
from tests.ranks.test_foreign import gpt2, loss_of, made

transformers = pytest.importorskip("transformers")
AdamW = partial(torch.optim.AdamW, lr=0.01)
TWO = pytest.mark.parametrize("shared_worlds", matrix([2, 3], [2]), indirect=True, scope="module")


def ddp(model: torch.nn.Module) -> tuple:
    wrapped = OverlappedDataParallel(model)
    return wrapped, AdamW(wrapped.parameters()), model.state_dict


def zero(stage: int, model: torch.nn.Module) -> tuple:
    return model, ZeroOptimizer(model.parameters(), AdamW, stage), model.state_dict


def sharded(wrapper: type, model: torch.nn.Module) -> tuple:
    wrapped = wrapper(model)
    return wrapped, AdamW(wrapped.parameters()), wrapped.full_state_dict


DATA = {"DDP": ddp, "ZeRO-1": partial(zero, 1), "ZeRO-2": partial(zero, 2)}
DATA |= {"ZeRO-3": partial(sharded, Zero3), "FSDP": partial(sharded, FullyShardedDataParallel)}


def learnt(model: torch.nn.Module, optimizer, share: bool = True, loss=loss_of) -> None:
    """share: on this rank's rows."""
    for step in range(3):
        torch.manual_seed(step)
        tokens_BT = torch.randint(260, (6, 17))
        tokens_BT = tokens_BT.chunk(dist.get_world_size())[dist.get_rank()] if share else tokens_BT
        optimizer.zero_grad()
        loss(model(tokens_BT[:, :-1]).logits, tokens_BT[:, 1:]).backward()
        getattr(model, "finish", lambda: None)()
        optimizer.step()


def adapted(**how) -> torch.nn.Module:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **how)
    return peft.get_peft_model(made("Llama"), config).double()


def adapters(wrap: str, how: dict, folder: str) -> list[float]:
    """Gaps: of all parameters, and of the model that is read back; how far the adapters moved."""
    import peft

    alone = adapted(**how)
    learnt(alone, AdamW([p for p in alone.parameters() if p.requires_grad]), share=False)
    wrapped, optimizer, state_of = DATA[wrap](model := adapted(**how))
    learnt(wrapped, optimizer)
    state, expected = state_of(), alone.state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    read = peft.PeftModel.from_pretrained(made("Llama"), folder).state_dict()
    before = adapted(**how).state_dict()
    return [max((expected[name] - x).abs().max().item() for name, x in each.items()) for each in (state, read, before)]


@TWO
@pytest.mark.parametrize("how", matrix([{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], [{}]), ids=str)
@pytest.mark.parametrize("wrap", matrix(DATA, ["FSDP", "ZeRO-2"]))
def test_lora_learns_what_it_does_in_one_process_and_is_written(shared_worlds, wrap, how, tmp_path):
    pytest.importorskip("peft")
    for learns, read, moved in shared_worlds.run(adapters, wrap, how, str(tmp_path)):
        assert max(learns, read) < (1e-12 if shared_worlds.size == 2 else 1e-6)  # norms round thirds of gradients to 32 bits
        assert moved > 0.01


def tensor(model: torch.nn.Module) -> tuple:
    wrapped = parallelize_transformers(model, None)
    return wrapped, AdamW(wrapped.parameters()), wrapped.full_state_dict


def experts(model: torch.nn.Module) -> tuple:
    take_over(model)
    return sharded(partial(ExpertParallel, experts="model.layers.*.mlp.experts"), model)


LLAMA, TIED, MIXTRAL = partial(made, "Llama"), partial(made, "Llama", tie_word_embeddings=True), partial(made, "Mixtral")
WRITTEN = {name: (LLAMA, wrap) for name, wrap in DATA.items()} | {"FSDP, tied": (TIED, DATA["FSDP"])}
WRITTEN |= {
    "tensor": (LLAMA, tensor),
    "tensor, tied": (TIED, tensor),
    "tensor, GPT-2": (gpt2, tensor),
    "experts": (MIXTRAL, experts),
}
IN_PARTS = ("ZeRO-3", "FSDP", "tensor", "tensor, tied", "tensor, GPT-2", "experts")


def written(case: str, folder: str) -> tuple[float, str]:
    """How far a model that is read back is from one process's; what save_pretrained says alone."""
    make, wrap = WRITTEN[case]
    alone, model = make(), make()
    learnt(alone, AdamW(alone.parameters()), share=False)
    wrapped, optimizer, state_of = wrap(model)
    cut = case.startswith("tensor")
    learnt(wrapped, optimizer, share=not cut, loss=wrapped.loss if cut and wrapped.vocabulary else loss_of)
    state, said = state_of(), ""
    try:
        model.save_pretrained(f"{folder}/{dist.get_rank()}")
    except ValueError as error:
        said = str(error)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    read = dict(type(model).from_pretrained(folder, dtype=torch.float64).named_parameters())
    return max((read.pop(name) - p).abs().max().item() for name, p in alone.named_parameters()) + len(read), said


@pytest.mark.parametrize("shared_worlds", [2], indirect=True, scope="module")
@pytest.mark.parametrize("case", matrix(WRITTEN, ["FSDP, tied", "tensor", "tensor, GPT-2", "experts"]))
def test_a_whole_model_is_written_and_read_back(shared_worlds, case, tmp_path):
    for gap, said in shared_worlds.run(written, case, str(tmp_path)):
        assert gap < 1e-6  # norms compute in 32 bits
        assert case not in IN_PARTS or re.match("save_pretrained of a .* in parts .*full_state_dict.* on all ranks", said)


def test_a_gpt_2_with_linear_layers_is_written_as_it_was(tmp_path):
    with_linear(gpt2()).save_pretrained(tmp_path)
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(map(torch.equal, read.parameters(), gpt2().parameters()))
