"""Refusals of parallel.tensor: on all ranks, before any message, so that none waits, and with what to do."""

from functools import partial

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
    vocab_parallel_cross_entropy,
)
from manyranks.parallel.tensor.cuts import Cut, by_heads
from manyranks.parallel.tensor.state import load_full_state_dict, tensor_state
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT
from tests.ranks import refused, test_tensor_checks
from tests.ranks.test_tensor import Counts, Fused, fused, heads, lively, random

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


def rows(**options):
    return VocabParallelEmbedding.of(nn.Embedding(7, 2, **options), How())


def looked_up(token: int):
    return VocabParallelEmbedding(10, 2)(torch.tensor([[0, token]]))


LOGITS, TARGETS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)


def of_loss(logits=LOGITS, targets=TARGETS, **options):
    return lambda: vocab_parallel_cross_entropy(logits, targets, **options)


def loaded(**change):
    """Into rows that are cut on 4 ranks, from a whole state but for this."""
    model, rows = nn.Linear(5, 24), {"weight": Cut(0, tuple(((6 * r, 6 * r + 6),) for r in range(4)), 0)}
    state = model.state_dict() | change
    model.weight = rows["weight"].part(model.weight)
    load_full_state_dict(model, {name: value for name, value in state.items() if value is not None}, rows)


def adafactor():
    tp = parallelize(nn.Sequential(nn.Linear(5, 24)), None, {"0": Column()})
    optimizer = torch.optim.Adafactor(tp.parameters())
    tp.module[0].weight.grad = torch.ones_like(tp.module[0].weight)
    optimizer.step()
    tensor_state(tp.module, tp.cuts, optimizer)


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
    "sizes of heads": (lambda: by_heads(25, 6, 2, 0), r"25 features do not make 6 heads of one size: correct heads="),
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
    "few heads in parts": (lambda: parallelize(nn.Sequential(nn.Linear(7, 28)), None, {"0": Column((12, 1, 1))}),
                           r"share one of them: give at most 1 ranks"),
    "sizes of parts": (lambda: parallelize(Fused(6), None, {"gate_up": Column(parts=5)}), r"36 features of gate_up do not"),
    "no example": (lambda: parallelize(Counts(6), None, heads(6)), r"Counts\.num_heads=12 counts heads .*give example=, "),
    "padding_idx": (lambda: rows(padding_idx=0), r"an embedding with padding_idx=0: it needs all rows"),
    "max_norm": (lambda: rows(max_norm=1.0), r"an embedding with max_norm=1\.0"),
    "sparse": (lambda: rows(sparse=True), r"an embedding with sparse=True"),
    "frequencies": (lambda: rows(scale_grad_by_freq=True), r"an embedding with scale_grad_by_freq=True"),
    "token -1": (lambda: looked_up(-1), r"^IndexError: token -1: this embedding has 10 rows; give tokens from 0 to 9$"),
    "token 10": (lambda: looked_up(10), r"^IndexError: token 10: this embedding has 10 rows"),
    "token 11": (lambda: looked_up(11), r"^IndexError: token 11: "),
    "more tokens": (of_loss(vocab=17), r"logits of 4 columns with vocab=17 on 4 ranks: each rank's are 5"),
    "fewer tokens": (of_loss(vocab=12), r"each rank's are 3"),
    "fewer targets": (of_loss(targets=TARGETS[:1]), r"targets of shape \(1, 3\) for logits of shape \(2, 3, 4\)"),
    "target 16": (of_loss(targets=TARGETS + 16), r"target 16: the vocabulary has 16 tokens"),
    "target 15": (of_loss(targets=TARGETS + 15, vocab=15), r"target 15: the vocabulary has 15 tokens"),
    "target -1": (of_loss(targets=TARGETS - 1), r"target -1: .* give 0 to 15, or ignore_index"),
    "real targets": (of_loss(targets=TARGETS.float()), r"targets torch\.float32"),
    "whole logits": (of_loss(LOGITS.long()), r"logits are torch\.int64"),
    "reduction": (of_loss(reduction="max"), r"reduction='max': give one of mean, sum, none"),
    "a state's size": (lambda: loaded(weight=torch.zeros(12, 5)), r"weight has shape \(12, 5\), .* has \(24, 5\)"),
    "a rank's state": (lambda: loaded(weight=torch.zeros(6, 5)), r"weight has shape \(6, 5\), and this model's has \(24, 5\)"),
    "a part of a state": (lambda: loaded(bias=None), r"RuntimeError: .*\n.*Missing key.*bias"),
    "Adafactor": (adafactor, r"an optimizer's state of shape .* use an elementwise optimizer"),
    "norm": (lambda: gpt(styles={"embedding": Positions()}).clip_grad_norm_(-1.0), r"most=-1\.0: give the largest norm"),
}  # fmt: skip


def refusals() -> dict[str, str]:
    return refused.said(REFUSED)


def test_what_does_not_fit_is_refused_on_all_ranks_with_what_to_do(four):
    m = four.measure(refusals)
    assert refused.unlike(REFUSED, m.results) == {}
    assert all(not calls for calls in m.calls.values())


# What only a pass shows


class Reads(nn.Module):
    """Its features are cut, and it divides by the norm of all of them; or it wants their number."""

    def __init__(self, **more):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 144), nn.Linear(144, 12), nn.LayerNorm(12)
        self.num_heads, self.fails = more.get("num_heads"), more.get("fails")
        lively(self).float()

    def forward(self, x):
        y = self.up(self.norm(x))
        return self.down(y.view(2, 3, 144) if self.fails else y / y.norm(dim=-1, keepdim=True))


X = torch.linspace(-1, 1, 72).view(2, 3, 12)
UP = {"up": Column(), "down": Row()}


def unseen():
    """A norm of heads that learns where nothing before it does: no graph shows that it has features of one rank."""
    model = Reads()
    model.up.requires_grad_(False)
    model.forward = lambda x: model.down(model.norm(model.up(x).unflatten(-1, (-1, 12))).flatten(-2))
    return parallelize(model, None, UP, example=X)


def on_both_sides():
    """The same norm before the column-parallel layer and behind it."""
    model = Reads()
    model.forward = lambda x: model.down(model.norm(model.up(model.norm(x)).unflatten(-1, (-1, 12))).flatten(-2))
    return parallelize(model, None, UP)(X)


def thawed():
    ours = parallelize(test_tensor_checks.model(4, 4), None, test_tensor_checks.styles(4, 4))
    for learns in (False, True):
        ours.module[1].q_norm.requires_grad_(learns)
        ours(random(2, 5, 8 * test_tensor_checks.D)).sum().backward()
        ours.finish()


def with_labels():
    class Model(nn.Sequential):
        def forward(self, x, labels=None):
            return self[0](x)

        def generate(self, x):
            return self(x).argmax(-1)

    return parallelize(Model(nn.Linear(12, 24)), None, {"0": Vocabulary()})


def stepped(optimizer, **how):
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12))
    early = optimizer(model.parameters(), lr=0.1, **how)
    parallelize(model, None, {"0": Column(), "1": Row()})(X).sum().backward()
    early.step()


def overwritten():
    layer, x = ColumnParallelLinear(4, 12, **SP), torch.ones(1, 2, 4)
    y = layer(x)
    x.add_(1)
    y.sum().backward()


def twice_derived(made: type):
    x = torch.randn(2, 4, requires_grad=True)
    layer = made(4, 8) if made is ColumnParallelLinear else made(16, 8)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.sum().backward()


SHOWN = {
    "not to be mended": (lambda: parallelize(Reads(num_heads=12), None, UP | {"up": Column(12)}, example=X),
                         r"down gives something else than it did; .*; to divide Reads\.num_heads=12 by t did not help"),
    "it fails": (lambda: parallelize(Reads(fails=True), None, UP, example=[X]), r"the model \(Reads\) fails once .*shape"),
    "halves": (lambda: parallelize(lively(Fused(12)), None, fused(12) | {"gate_up": Column()}, example=random(2, 4, 7)),
               r"down gives .*; a layer makes 2 times what the next one takes: if .* give it Column\(parts=2\)"),
    "a gradient": (unseen, r"the gradient of norm\.weight is a part of the whole model's that nobody adds up: enter"),
    "on both sides": (on_both_sides, r"norm.weight works on features of one rank and on whole ones: .* cut it by Column\(\)"),
    "thawed": (thawed, r"1\.q_norm\.weight was frozen in the first forward pass.*: thaw it before, or parallelize"),
    "generate": (lambda: with_labels().module.generate(X), r"generate\(\) while the vocabulary is cut: each rank would choose"),
    "labels": (lambda: with_labels()(X, labels=X), r"labels= while the vocabulary is cut: .*loss\(logits, targets\)"),
    "AdamW": (partial(stepped, torch.optim.AdamW, fused=True), r"AdamW was made before 0 was cut.*: make it after parallelize"),
    "SGD": (partial(stepped, torch.optim.SGD), r"SGD was made before 0 was cut"),
    "overwritten": (overwritten, r"RuntimeError: the input of a column-parallel layer was changed in place"),
    "columns' second derivative": (partial(twice_derived, ColumnParallelLinear), "RuntimeError: .*once_differentiable"),
    "rows' second derivative": (partial(twice_derived, RowParallelLinear), "RuntimeError: .*once_differentiable"),
}  # fmt: skip


def test_what_would_be_wrong_is_refused_on_all_ranks_with_what_to_do(four):
    assert refused.unlike(SHOWN, four.run(refused.said, SHOWN)) == {}


# What is near it and right


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
