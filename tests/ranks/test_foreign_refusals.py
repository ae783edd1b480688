"""Models of transformers that nobody here wrote: what can't be right is refused, by name and with a way out."""

import re
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from manyranks.parallel import OverlappedDataParallel
from manyranks.parallel.context import ContextParallel
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.expert.families import take_over
from manyranks.parallel.pipeline.split import dealt, split
from manyranks.parallel.tensor import Column, Row, Vocabulary, parallelize
from manyranks.parallel.tensor.families import parallelize_transformers, with_linear
from tests.ranks import refused

transformers = pytest.importorskip("transformers")

# Experts

SIZES = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
SIZES |= {"hidden_size": 32, "moe_hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16}
SIZES |= {"hidden_act": "silu", "swiglu_limit": 2.0, "swiglu_alpha": 1.7, "_experts_implementation": "eager"}


def experts(family: str, name: str, **more) -> torch.nn.Module:
    """One layer's, between others, as a model has them; square: the feed-forward size is the hidden one."""
    torch.manual_seed(0)
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(module, f"{name}Experts")(SimpleNamespace(**SIZES | more)).double().eval()
    for p in made.parameters():
        torch.nn.init.normal_(p)
    return torch.nn.ModuleDict({"experts": made})


RIGHT = {
    "plain": ("mixtral", "Mixtral", {}),
    "any sizes": ("mixtral", "Mixtral", {"intermediate_size": 32}),
    "one expert": ("mixtral", "Mixtral", {"num_local_experts": 1}),
    "default": ("mixtral", "Mixtral", {"_experts_implementation": "grouped_mm"}),  # which has no float64
    "transposed": ("aria", "Aria", {}),
    "clamped": ("deepseek_v4", "DeepseekV4", {}),
    "clamped after it": ("glm5_next", "Glm5NextText", {}),
    "with biases": ("gpt_oss", "GptOss", {"intermediate_size": 32}),
    "halves": ("openai_privacy_filter", "OpenAIPrivacyFilter", {}),
    "halves without biases": ("minimax_m3_vl", "MiniMaxM3VL", {}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_experts_that_are_taken_over_compute_what_they_did(case):
    family, name, more = RIGHT[case]
    theirs, model = experts(family, name, **more), experts(family, name, **more)
    theirs.experts.config._experts_implementation = "eager"
    assert take_over(model) == ["experts"]
    assert not model.experts.training
    x_TH = torch.randn(24, 32, dtype=torch.float64, requires_grad=True)
    choices_TK = torch.arange(48).view(24, 2) % len(theirs.experts.down_proj)
    found = []
    for each in (theirs, model):
        y_TH = each.experts(x_TH, choices_TK, torch.linspace(-1, 1, 48, dtype=torch.float64).view(24, 2))
        found.append([y_TH, *torch.autograd.grad(y_TH.square().sum(), [x_TH, *each.parameters()])])
    tolerance = 1e-5 if case == "halves" else 1e-12  # it computes in 32 bits
    assert all((x - y).abs().max() < tolerance * x.abs().max() for x, y in zip(*found, strict=True))


class Own(torch.nn.Module):
    """Experts of nobody's library; wrong: in what they differ from plain ones."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.zeros(2, *size)) for size in ((12, 5), (5, 6)))
        self.act_fn, self.wrong = torch.nn.SiLU(), wrong

    def forward(self, x_TH, choices_TK, gates_TK):
        both_TEF = torch.einsum("th,efh->tef", x_TH, self.gate_up_proj)
        gate, up = (both_TEF[..., ::2], both_TEF[..., 1::2]) if self.wrong == "halves" else both_TEF.chunk(2, -1)
        gate = gate.clamp(max=7) if self.wrong == "clamped" else gate
        down = self.down_proj.detach() if self.wrong == "a gradient" else self.down_proj
        y_TEH = torch.einsum("tef,ehf->teh", self.act_fn(gate) * up, down)
        return (y_TEH.gather(1, choices_TK[..., None].expand(-1, -1, 5)) * gates_TK[..., None]).sum(1)


WRONG = {
    "a norm": (
        lambda: experts("muse_spark", "MuseSpark", post_norm_eps=1e-5),
        "experts, a MuseSparkExperts, .*: the output differs",
    ),
    "another form": (
        lambda: experts("llama4", "Llama4Text"),
        "a Llama4TextExperts, .*called with tokens, choices and gates, it fails",
    ),
    "other weights": (lambda: experts("longcat_flash", "LongcatFlash", zero_expert_num=2, expert_ffn_hidden_size=16), "fails"),
    "clamped": (lambda: torch.nn.Sequential(Own("clamped")), "0, an? Own, .*: the output differs; "),
    "halves": (lambda: torch.nn.Sequential(Own("halves")), "0, an? Own, .*: the output differs; "),
    "a gradient": (lambda: torch.nn.Sequential(Own("a gradient")), "0, an? Own, .*: the gradient of down_proj differs; "),
    "none": (lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), "Sequential has no experts with the weights"),
}


@pytest.mark.parametrize("case", WRONG)
def test_experts_that_compute_something_else_are_refused_and_stay(case):
    make, says = WRONG[case]
    model = make()
    before = list(model.modules())
    with pytest.raises(ValueError, match=f"{says}.*derive a class from parallel.expert.Experts"):
        take_over(model)
    assert list(model.modules()) == before


def test_experts_of_one_s_own_are_taken_over_wherever_they_stand():
    own = Own()
    model = torch.nn.ModuleList([own, torch.nn.Sequential(own)])
    assert take_over(model) == ["0", "1.0"]
    assert model[0] is model[1][0] is not own
    assert model[0].down_proj is own.down_proj


# What is cut

TWO = pytest.mark.parametrize("shared_worlds", [2], indirect=True, scope="module")
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 260}
TINY |= {"num_hidden_layers": 2, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": None}
TINY |= {"bos_token_id": None, "eos_token_id": None, "experts_implementation": "eager"}
MLA = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
MLA |= {"moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MLA |= {"head_dim": 4, "qk_nope_head_dim": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
LAYER, TOKENS = "model.layers.*.", torch.arange(16)[None]
HEADS = {f"{LAYER}self_attn.{name}_proj": Column(4) for name in "qkv"} | {f"{LAYER}self_attn.o_proj": Row(4)}
MLP = {f"{LAYER}mlp.{name}_proj": Column() for name in ("gate", "up")} | {f"{LAYER}mlp.down_proj": Row()}
LATENT = {f"{LAYER}self_attn.{name}_proj": Row(4) if name == "o" else Column(4) for name in ("q_b", "kv_b", "o")}
MIXER = {"backbone.layers.*.mixer.in_proj": Column(parts=2), "backbone.layers.*.mixer.out_proj": Row()}
BLOCK = {f"encoder.block.*.layer.0.SelfAttention.{name}": Row(4) if name == "o" else Column(4) for name in "qkvo"}
QKV = {f"{LAYER}self_attn.qkv_proj": Column((4, 4, 4)), f"{LAYER}self_attn.o_proj": Row(4)}


def made(family: str, kind: str = "ForCausalLM", **more) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY | more)
    return getattr(transformers, family + kind)(config).eval()


def cut(table, family: str, more=(), kind: str = "ForCausalLM", **how):
    """Cuts a model, and calls it as its example says, or by tokens."""
    model, given = made(family, kind, **dict(more)), how.get("example") or {"input_ids": TOKENS}
    return parallelize(model, None, table, **how)(**given)


def called(table, how, *inputs, **named):
    """The same of a model whose head is cut."""
    model = parallelize(made("Llama"), None, table)
    return getattr(model.module, how)(*inputs, **named)


def attention():
    """A model of one's own around transformers' attention."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = made("Llama")

        def forward(self, tokens, positions):
            return self.model(tokens, position_ids=positions[None]).logits

    ContextParallel(Own(), "model.model.layers.*.self_attn")(TOKENS)


BOTH = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
EXAMPLE = {"example": {"input_ids": TOKENS}}
OWN = {"lm_head": Column()}
PARTS = {**HEADS, **MLP, "model.embed_tokens": Vocabulary(), "lm_head": Vocabulary()}
WAY_OUT = ".*, or the layers around it stay out of the table$"
LABELS = "^labels= while the vocabulary is cut"
CALLS = {
    "norm of all heads": (partial(cut, HEADS, "Olmo2", **EXAMPLE), rf"q_norm \(Olmo2RMSNorm\) fails once {WAY_OUT}"),
    "without an example": (partial(cut, HEADS, "Olmoe", {"num_experts": 4}), rf"q_norm \(OlmoeRMSNorm\) fails once {WAY_OUT}"),
    "shared by heads": (
        partial(cut, LATENT, "DeepseekV3", MLA, **EXAMPLE),
        r"kv_a_proj_with_mqa.weight works on .*leave whole",
    ),
    "scanned": (partial(cut, MIXER, "Mamba", {"state_size": 4}), rf"layers.0.mixer \(MambaMixer\) fails once {WAY_OUT}"),
    "bias of all heads": (
        partial(cut, BLOCK, "T5", T5, "ForConditionalGeneration", example=BOTH),
        r"SelfAttention \(T5Attention\) fails .*; to divide T5Attention.n_heads=4 by t did not help$",
    ),
    "config's heads": (partial(cut, QKV, "Phi3", **EXAMPLE), r"0.self_attn.o_proj \(RowParallelLinear\) fails once"),
    "whole tokens": (
        partial(cut, PARTS, "Llama", sequence_parallel=True),
        r"self_attn.o_proj .*gather all .* or leave the option",
    ),
    "whole tokens seen": (partial(cut, PARTS, "Llama", sequence_parallel=True, **EXAMPLE), r"self_attn.o_proj .*gather all"),
    "labels": (partial(called, OWN, "__call__", input_ids=TOKENS, labels=TOKENS), LABELS),
    "labels by place": (partial(called, PARTS, "__call__", TOKENS, *[None] * 4, TOKENS), LABELS),
    "generate": (partial(called, OWN, "generate", TOKENS), r"^generate\(\) while the vocabulary is cut"),
    "no head": (lambda: parallelize_transformers(made("Llama", "Model"), None), "^LlamaModel has no head .*give a causal"),
    "another head": (
        lambda: parallelize_transformers(made("Llama", "ForSequenceClassification"), None),
        "^LlamaForSequenceClassification has no head that makes logits: give a causal language model",
    ),
    "positions": (
        lambda: ContextParallel(made("Llama"), f"{LAYER}self_attn"),
        "^LlamaForCausalLM takes attention_mask where .* gives positions; .*register ring_attention by AttentionInterface",
    ),
    "not q, k and v": (attention, "self_attn is called with hidden_states, .*, not with q, k and v; .*AttentionInterface"),
    "stages": (lambda: split(made("Llama"), 2), "^LlamaForCausalLM has no embedding and no layers and no head: give one whose"),
    "stages of sizes": (
        lambda: dealt(made("Llama").model, [2, 2]),
        "^LlamaModel has no embedding and no head: .*Your own model",
    ),
}


@TWO
def test_what_cannot_be_cut_is_refused_by_the_name_of_a_module_and_with_a_way_out(shared_worlds):
    for said in shared_worlds.run(refused.said, CALLS):
        assert {name: said[name] for name, (_, message) in CALLS.items() if not re.search(message, said[name])} == {}


def modes() -> list[bool]:
    """Whether any module of a model that is not in training is, once it is wrapped."""
    table = {"model.layers.*.mlp.up_proj": Column(), "model.embed_tokens": Vocabulary(), "lm_head": Vocabulary()}
    mixtral = made("Mixtral", num_local_experts=4)
    take_over(mixtral)
    gpt2 = made("GPT2", "LMHeadModel", n_layer=2, n_embd=32, n_head=4, n_positions=64)
    plain = torch.nn.ModuleDict({"embedding": torch.nn.Linear(2, 2), "layers": torch.nn.ModuleList(), "head": torch.nn.ReLU()})
    wrapped = [
        parallelize(made("Llama"), None, table),
        OverlappedDataParallel(made("Llama")),
        ExpertParallel(mixtral, f"{LAYER}mlp.experts"),
        with_linear(gpt2),
        *split(plain.eval(), 2),
    ]
    return [any(module.training for module in model.modules()) for model in wrapped]


@TWO
def test_a_model_that_is_not_in_training_stays_so(shared_worlds):
    assert shared_worlds.run(modes) == [[False] * 6] * 2
