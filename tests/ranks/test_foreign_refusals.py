"""Models of transformers that nobody here wrote: what can't be right is refused, by name and with a way out."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from manyranks.parallel.expert.families import take_over

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
