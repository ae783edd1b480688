"""Models of transformers that nobody here wrote: cut over ranks, and their experts dealt to them, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import manyranks as mr
from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.expert.families import take_over
from manyranks.parallel.tensor import Column, Row, parallelize
from manyranks.parallel.tensor.families import parallelize_transformers, with_linear
from tests.conftest import matrix

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"vocab_size": 260, "num_hidden_layers": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES = {
    **{name: {} for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
    "Gemma3": {"sliding_window": 8, "pad_token_id": 0},  # its embedding is scaled, tied, and has a padding row
    "Phi3": {},  # queries, keys and values in one layer, and gate and up
    "Glm4": {},
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, **EXPERTS},
}


def made(name: str, **more) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**SIZES | FAMILIES[name] | more)).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which begin at 1 and 0
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def learnt(model: torch.nn.Module, loss, finish=lambda: None, share: bool = False) -> None:
    """share: on this rank's rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        torch.manual_seed(step)
        tokens_BT = torch.randint(260, (4, 17))
        tokens_BT = tokens_BT.chunk(dist.get_world_size())[dist.get_rank()] if share else tokens_BT
        optimizer.zero_grad()
        loss(model(tokens_BT[:, :-1]).logits, tokens_BT[:, 1:]).backward()
        finish()
        optimizer.step()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("shared_worlds", matrix([2, 4], [4]), indirect=True, scope="module")
@pytest.mark.parametrize("name", matrix(FAMILIES, ["Qwen3", "Gemma3", "Mixtral", "Glm4"]))
def test_a_model_cut_over_ranks_learns_what_one_process_learns(shared_worlds, name):
    def gap() -> float:
        sizes = {"num_key_value_heads": 4} if name == "Phi3" else {}  # a rank has whole ones of its own
        alone, model = made(name, **sizes), parallelize_transformers(made(name, **sizes), None)
        learnt(alone, loss_of)
        learnt(model, model.loss if model.vocabulary else loss_of, model.finish)
        whole = model.full_state_dict()
        return max((whole[name] - p.detach()).abs().max().item() for name, p in alone.named_parameters())

    # Norms compute in float32, whatever the model's type: parts of a sum differ by 1e-7. A gradient that is not summed: 1e-2.
    assert max(shared_worlds.run(gap)) < 1e-6


FAMILIES["DeepseekV3"] = {"n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2}
FAMILIES["DeepseekV3"] |= {"topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES["DeepseekV3"] |= {"head_dim": 4, "qk_nope_head_dim": 4, "num_key_value_heads": 4, **EXPERTS}
FAMILIES["GptOss"] = {"num_local_experts": 4, "sliding_window": 8, "swiglu_limit": 0.5, **EXPERTS}


@pytest.mark.parametrize("shared_worlds", matrix([2, 4], [4]), indirect=True, scope="module")
@pytest.mark.parametrize("name", matrix(["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"], ["DeepseekV3", "GptOss"]))
def test_experts_that_are_dealt_to_ranks_learn_what_one_process_learns(shared_worlds, name):
    def gap() -> float:
        alone, model = made(name), made(name)
        assert all(name.endswith(".mlp.experts") for name in take_over(model))
        model = ExpertParallel(model, "model.layers.*.mlp.experts")
        learnt(alone, loss_of)
        learnt(model, loss_of, model.finish, share=True)
        whole = model.full_state_dict()
        return max((whole[name] - p.detach()).abs().max().item() for name, p in alone.named_parameters())

    assert max(shared_worlds.run(gap)) < 1e-6


@pytest.mark.parametrize("shared_worlds", matrix([2, 4], [2]), indirect=True, scope="module")
@pytest.mark.parametrize("name", matrix(["Llama", "Mistral", "Qwen2", "Qwen3", "Glm4"], ["Qwen3"]))
def test_a_sequence_cut_between_the_parts_learns_what_one_process_learns(shared_worlds, name):
    def gap() -> float:
        alone = made(name, sliding_window=None)
        model = parallelize_transformers(made(name, sliding_window=None), None, sequence_parallel=True)
        learnt(alone, loss_of)
        learnt(model, model.loss, model.finish)
        whole = model.full_state_dict()
        return max((whole[name] - p.detach()).abs().max().item() for name, p in alone.named_parameters())

    def step() -> None:
        how = {"sequence_parallel": True, "example": False}
        model = parallelize_transformers(made(name, sliding_window=None), None, **how)
        tokens = torch.zeros(1, 16, dtype=torch.long)
        model.loss(model(tokens).logits, tokens).backward()

    assert max(shared_worlds.run(gap)) < 1e-6
    calls, n = [call.op for call in shared_worlds.measure(step).calls[0]], shared_worlds.size
    # A layer: attention's and the MLP's input gathered, their output scattered, and both again backward. The embedding's output
    # is scattered, the head's input gathered, and once more backward.
    assert (calls.count("all_gather"), calls.count("send")) == (2 * 4 + 3, (n - 1) * (2 * 4 + 2))


@pytest.mark.parametrize("shared_worlds", [2], indirect=True, scope="module")
def test_positions_of_one_s_own_stay_on_one_rank_and_are_refused_on_two(shared_worlds):
    def gap(t: int) -> float:
        mesh = init_device_mesh("cpu", (2 // t, t), mesh_dim_names=("dp", "tp"))
        alone, model = made("Llama"), parallelize_transformers(made("Llama"), mesh, sequence_parallel=True)
        tokens_BT, positions_BT = torch.arange(16)[None], 3 * torch.arange(16)[None]
        whole, own = (each(tokens_BT, position_ids=positions_BT).logits for each in (alone, model))
        return (whole - own).abs().max().item()

    assert max(shared_worlds.run(gap, 1)) < 1e-6
    with pytest.raises(mr.RankFailed, match="attention_mask with sequence_parallel=True"):  # transformers makes one of them
        shared_worlds.run(gap, 2)


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("Mixtral", {}, "mixtral has experts, which need all tokens in one place; leave it out"),
        ("Mistral", {"sliding_window": 8}, "the mask of a window"),
        ("Llama", {"attn_implementation": "eager"}, "the attention is 'eager', not 'sdpa'"),
        ("Llama", {"pad_token_id": 0}, "the embedding is scaled or has a padding row"),
    ],
)
def test_a_model_whose_sequence_cannot_be_cut_is_refused(name, more, says):
    with pytest.raises(ValueError, match=f"sequence_parallel=True: .*{says}"):
        parallelize_transformers(made(name, **more), None, sequence_parallel=True)


def gpt2(**more) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 261,
        "attn_pdrop": 0.0,
        "use_cache": False,
    }
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | more)).double()


@pytest.mark.parametrize("shared_worlds", [2, 4], indirect=True, scope="module")
def test_gpt_2_learns_what_one_process_learns_and_its_layers_compute_what_they_did(shared_worlds):
    def gaps() -> tuple[float, float]:
        before, alone, model = gpt2(), with_linear(gpt2()), parallelize_transformers(gpt2(), None)
        tokens = torch.randint(261, (2, 16))
        same = (before.eval()(tokens).logits - alone.eval()(tokens).logits).abs().max().item()
        learnt(alone.train(), loss_of)
        learnt(model, model.loss, model.finish)
        whole = model.full_state_dict()
        return same, max((whole[name] - p.detach()).abs().max().item() for name, p in alone.named_parameters())

    assert all(same < 1e-12 and gap < 1e-10 for same, gap in shared_worlds.run(gaps))


@pytest.mark.parametrize(
    ("more", "how", "says"),
    [
        ({"attn_pdrop": 0.1}, {}, "attn_pdrop=0.1: .*same masks for different heads"),
        ({"add_cross_attention": True}, {}, "add_cross_attention=True"),
        ({}, {"sequence_parallel": True}, "sequence_parallel=True: GPT-2 adds positions of all tokens"),
    ],
)
def test_a_gpt_2_that_cannot_be_cut_is_refused(more, how, says):
    with pytest.raises(ValueError, match=says):
        parallelize_transformers(gpt2(**more), None, **how)


def test_a_model_that_would_draw_the_same_masks_for_different_heads_or_has_no_head_is_refused():
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1: ranks would draw the same masks for different heads"):
        parallelize_transformers(made("Llama", attention_dropout=0.1), None)
    with pytest.raises(ValueError, match="LlamaModel has no head that makes logits: give a causal language model"):
        parallelize_transformers(made("Llama").model, None)


def opt() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 261}
    sizes |= {"word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.0, "use_cache": False}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes)).double()


@pytest.mark.parametrize("shared_worlds", [2, 4], indirect=True, scope="module")
def test_an_opt_that_counts_whole_heads_counts_its_own_after_the_comparison(shared_worlds):
    def gap() -> float:
        layer, tokens = "model.decoder.layers.*", torch.arange(16)[None]
        table = {f"{layer}.self_attn.{name}_proj": Column(4) for name in "qkv"}
        table |= {f"{layer}.self_attn.out_proj": Row(4), f"{layer}.fc1": Column(), f"{layer}.fc2": Row()}
        alone, model = opt(), parallelize(opt(), None, table, example={"input_ids": tokens})
        learnt(alone, loss_of)
        learnt(model, loss_of, model.finish)
        whole = model.full_state_dict()
        return max((whole[name] - p.detach()).abs().max().item() for name, p in alone.named_parameters())

    assert max(shared_worlds.run(gap)) < 1e-9


def test_a_model_without_a_table_is_refused():
    sizes = {"n_layer": 1, "n_embd": 24, "n_head": 2, "vocab_size": 50}
    with pytest.raises(ValueError, match=r"model_type='gptj': there are tables for llama, mistral.* and gpt2"):
        parallelize_transformers(transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes, rotary_dim=4)), None)


def test_a_cache_beside_checkpoints_is_named():
    model = made("Llama", use_cache=True)
    checkpoint_modules(model, lambda module: type(module).__name__ == "LlamaDecoderLayer")
    with pytest.raises(RuntimeError, match="a cache of keys and values has such tensors"):
        learnt(model, loss_of)
