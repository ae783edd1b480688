"""What parallel.tensor refuses: on all ranks, before any message, so that none waits, and with what to do."""

import re

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrizations, weight_norm

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.tensor import (
    Column,
    ColumnParallelLinear,
    How,
    Masks,
    Positions,
    Row,
    RowParallelLinear,
    VocabParallelEmbedding,
    Vocabulary,
    column_parallel,
    parallelize,
)
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT
from tests.ranks import refused

SP = {"sequence_parallel": True}


def gpt(mesh=None, axis: str = "tp", styles=None, sizes=None, **how):
    config = GPTConfig(
        layers=1, **({"hidden": 48, "heads": 12, "ffn": 48, "vocab": 13, "seq": 12, "tied": False} | (sizes or {}))
    )
    return parallelize(GPT(config), mesh, styles or tensor_styles.styles(config), axis, **how)


def tied():
    config = GPTConfig(layers=1, hidden=24, heads=12, vocab=12, seq=12)
    styles = {name: style for name, style in tensor_styles.styles(config).items() if name != "head.projection"}
    return parallelize(GPT(config), None, styles)


def tied_in_two_ways(of_head: Row | Column):
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)})
    model.head.weight = model.tokens.weight
    return parallelize(model, None, {"tokens": Vocabulary(), "head": of_head})


def two_heads():
    model = nn.ModuleDict({"head": nn.Linear(8, 12), "second": nn.Linear(8, 16)})
    return parallelize(model, None, {"head": Vocabulary(), "second": Vocabulary()})


def of_other_kinds(*others: nn.Module):
    return column_parallel(torch.ones(2, 3, 4), ColumnParallelLinear(4, 8), *others)


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * 5.0


class WithBuffer(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("scale", torch.ones(8))


def checkpointed():
    checkpoint_modules(linear := nn.Linear(8, 8), lambda module: True)
    return linear


def hooked():
    (linear := nn.Linear(8, 8)).register_forward_pre_hook(lambda module, inputs: None)
    return linear


def more(module: nn.Module):
    style = Vocabulary() if isinstance(module, nn.Embedding) else Column()
    return parallelize(nn.ModuleDict({"part": module}), None, {"part": style})


REFUSED = {
    "a forward": (lambda: more(Scaled(8, 8)), r"Vocabulary\(\) for part, a Scaled: its part would ignore a forward of its"),
    "a checkpoint": (lambda: more(checkpointed()), r"for part, a Linear: its part would ignore a forward of its own; move"),
    "hooks": (lambda: more(hooked()), r"a Linear: its part would ignore its hooks \(forward_pre_hooks\); move"),
    "weight_norm": (lambda: more(parametrizations.weight_norm(nn.Linear(8, 8))), r"ignore its parametrizations \(weight\)"),
    "old weight_norm": (lambda: more(weight_norm(nn.Linear(8, 8))), r"would ignore its hooks \(forward_pre_hooks\); move that"),
    "a buffer": (lambda: more(WithBuffer()), r"part, a WithBuffer: its part would ignore its scale; move that into"),
    "heads": (lambda: gpt(sizes={"heads": 6}), r"6 heads on 4 tensor-parallel ranks: one must divide the other"),
    "few heads": (lambda: gpt(sizes={"heads": 2}), r"2 heads on 4 tensor-parallel ranks.*at most 2 ranks"),
    "key/value heads": (lambda: gpt(sizes={"kv_heads": 6}), r"6 heads on 4 tensor-parallel ranks"),
    "feed-forward": (lambda: gpt(sizes={"ffn": 50}), r"50 features of layers\.0\.mlp\.\w+ on 4 .* 1, 2, 5, 10, 25, 50 ranks"),
    "column": (lambda: ColumnParallelLinear(4, 6), r"6 features on 4 tensor-parallel ranks.*1, 2, 3, 6 ranks"),
    "row": (lambda: RowParallelLinear(6, 4), r"6 features on 4 tensor-parallel ranks"),
    "pattern": (lambda: gpt(styles={"layers.*.mpl.up": Column()}), r"'layers\.\*\.mpl\.up' matches no module: see the model's"),
    "axis": (lambda: gpt(init_device_mesh("cpu", (4,), mesh_dim_names=("model",))), r"axis='tp': the mesh has 'model'; make"),
    "no names": (lambda: gpt(init_device_mesh("cpu", (4,))), r"axis='tp': the mesh has no names; make it by init_device_mesh"),
    "overlap": (lambda: gpt(overlap=True), r"overlap=True needs sequence_parallel=True and regather=True"),
    "overlap, kept": (lambda: gpt(overlap=True, regather=False, **SP), r"overlap=True needs sequence_parallel=True"),
    "a layer's overlap": (lambda: RowParallelLinear(8, 4, overlap=True), r"overlap=True needs sequence_parallel=True"),
    "sequence": (lambda: gpt(**SP)(torch.ones(2, 10, dtype=torch.long)), r"\(1, 10\) on 4 ranks: .* a multiple of 4 tokens"),
    "rows' sequence": (lambda: RowParallelLinear(8, 4, **SP)(torch.ones(2, 10, 2)), r"\(2, 10, 4\) on 4 ranks: .* of 4 tok"),
    "overlapped rows": (lambda: RowParallelLinear(8, 4, overlap=True, **SP)(torch.ones(2, 10, 2)), r"\(2, 10, 2\) on 4 ranks"),
    "no sequence": (lambda: ColumnParallelLinear(4, 8, **SP)(torch.ones(4, 4)), r"shape \(4, 4\) .*give \[batch, seq"),
    "rows, no sequence": (lambda: RowParallelLinear(8, 4, **SP)(torch.ones(4, 2)), r"shape \(4, 2\) .*give \[batch, seq"),
    "a norm": (lambda: gpt(styles={"head.norm": Column()}), r"Column\(heads=None\) for head\.norm, a RMSN.*: give C"),
    "an embedding": (lambda: gpt(styles={"embedding.tokens": Row()}), r"for embedding\.tokens, a Embedding: .*Vocabulary"),
    "masks": (lambda: gpt(styles={"head.norm": Masks()}), r"Masks\(always=False\) for head\.norm, a RMSNorm: .* dropout"),
    "two heads": (two_heads, r"second has 16 tokens, another head 12: loss\(\) needs one vocabulary"),
    "a class": (lambda: gpt(styles={"head.projection": Vocabulary}), r"for head\.projection, a Linear: give Column"),
    "twice": (lambda: parallelize(gpt(styles={"head.projection": Column()}, sizes={"vocab": 12}).module, None,
                                  {"head.projection": Column()}), r"a ColumnParallelLinear: .*; cut a model once"),
    "tied": (tied, r"head\.projection\.weight is tied to a parameter that was cut: give its module a style"),
    "tied in two ways": (lambda: tied_in_two_ways(Row()), r"head has a parameter that another module has.*the same style"),
    "a whole layer beside": (lambda: of_other_kinds(nn.Linear(4, 8)), r"ColumnParallelLinear, Linear read one input: all mus"),
    "other options": (lambda: of_other_kinds(ColumnParallelLinear(4, 8, **SP)), r"read one input: .* with the same options"),
    "a part's overlap": (lambda: ColumnParallelLinear.of(nn.Linear(4, 8), How(overlap=True)), r"overlap=True needs sequence"),
    "rows' overlap": (lambda: VocabParallelEmbedding.of(nn.Embedding(4, 8), How(overlap=True)), r"overlap=True needs seq"),
    "a loss of whole logits": (lambda: gpt(styles={"embedding": Positions()}).loss(torch.ones(2, 3, 5), torch.ones(2, 3)),
                               r"no linear layer is cut by Vocabulary\(\): give the head this style, or, .*cross_entropy"),
    "norm": (lambda: gpt(styles={"embedding": Positions()}).clip_grad_norm_(-1.0), r"most=-1\.0: give the largest norm"),
}  # fmt: skip


def refusals() -> dict[str, str]:
    return refused.said(REFUSED)


def test_what_does_not_fit_is_refused_on_all_ranks_with_what_to_do(four):
    m = four.measure(refusals)
    for found in m.results:
        assert {name: found[name] for name, (_, message) in REFUSED.items() if not re.search(message, found[name])} == {}
    assert all(not calls for calls in m.calls.values())


def test_a_tied_parameter_that_two_styles_cut_alike_is_not_refused(four):
    assert four.run(lambda: len(tied_in_two_ways(Column()).cuts)) == [2] * 4


def test_a_rank_that_the_mesh_has_not_is_told_so_and_the_others_are_parallelized(four):
    def parallelized() -> str:
        mesh = DeviceMesh("cpu", [3, 1], mesh_dim_names=("tp",))
        try:
            model = parallelize(nn.Sequential(nn.Linear(4, 8)), mesh, {"0": Column()})
            return f"weight {list(model.module[0].weight.shape)}"
        except ValueError as error:
            return str(error)

    refused = "rank {} is not in the mesh [3, 1]: call parallelize on the ranks of the mesh only"
    assert four.run(parallelized) == [refused.format(0), "weight [4, 4]", refused.format(2), "weight [4, 4]"]
