"""What learners' answers to 09_mfu have in common: each is right, and made of parts that a wrong one replaces."""

import math
from itertools import groupby

LOOKED_UP = ("embedding.tokens.weight", "embedding.positions.weight")


class RightForward:
    def __call__(self, m, batch, seq, predicted):
        self.m, self.batch, self.seq, self.predicted = m, batch, seq, predicted
        self.tokens, self.moe = batch * seq, m.layers - m.dense_layers
        return self.form(
            {
                "attention": self.attention(),
                "scores": self.scores(),
                "mlp": self.mlp(),
                "router": self.router(),
                "head": self.head(),
            }
        )

    def form(self, found):
        return found

    def kv(self):
        return self.m.kv_heads * self.m.hidden // self.m.heads

    def attention(self):
        return 2 * self.tokens * self.m.layers * self.m.hidden * 2 * (self.m.hidden + self.kv())

    def scores(self):
        return 4 * self.batch * self.seq * self.seq * self.m.hidden * self.m.layers

    def matrices(self):
        return 3 if self.m.gated else 2

    def chosen(self):
        return self.m.top_k + self.m.shared_experts

    def width(self):
        return self.m.dense_layers * self.m.ffn + self.moe * self.chosen() * self.m.expert_ffn

    def mlp(self):
        return 2 * self.tokens * self.m.hidden * self.matrices() * self.width()

    def router(self):
        return 2 * self.tokens * self.m.hidden * self.m.experts * self.moe

    def rows(self):
        return self.batch * self.predicted

    def head(self):
        return 2 * self.rows() * self.m.hidden * self.m.vocab


class RightStep:
    def __call__(self, layers, head, recompute, flash):
        self.layers, self.recompute, self.flash = layers, recompute, flash
        self.head = head
        model = self.of_head() + sum(self.of(layer, comes) for layer, comes in zip(layers, self.comes(), strict=True))
        return self.form(model, model + self.again())

    def form(self, model, hardware):
        return model, hardware

    def comes(self):
        """Whether backward comes to each layer."""
        found, so_far = [], False
        for layer in self.layers:
            so_far = so_far or layer.learns
            found.append(so_far)
        return found

    def of(self, layer, comes):
        backward = layer.products * self.products(layer.learns, comes) + layer.scores * self.scores(layer.learns, comes)
        return layer.products + layer.scores + backward

    def products(self, learns, comes):
        return comes + learns

    def scores(self, learns, comes):
        return 2 * comes

    def of_head(self):
        return 3 * self.head

    def where(self, learns, comes):
        return comes

    def where_flash(self, learns, comes):
        return self.where(learns, comes)

    def recomputed(self, layer):
        return {"none": 0, "selective": layer.scores, "full": layer.products + layer.scores}[self.recompute]

    def of_flash(self, layer):
        return layer.scores / 2 if self.flash else 0

    def again(self):
        total = 0
        for layer, comes in zip(self.layers, self.comes(), strict=True):
            total += self.recomputed(layer) * self.where(layer.learns, comes)
            total += self.of_flash(layer) * self.where_flash(layer.learns, comes)
        return total


class RightMfu:
    def __call__(self, run, sheet, convention):
        self.run, self.sheet, self.convention = run, sheet, convention
        return self.form(self.token() * self.tokens() / run.seconds / (self.chips() * self.peak()))

    def form(self, share):
        return share

    def size(self, name):
        return math.prod(self.run.shapes.get(name, (0,)))

    def parameters(self):
        return sum(map(self.size, self.run.shapes))

    def matrices(self):
        return [name for name, shape in self.run.shapes.items() if len(shape) == 2 and name not in LOOKED_UP]

    def products(self):
        tied = self.size("embedding.tokens.weight") if self.run.tied else 0
        return sum(map(self.size, self.matrices())) + tied

    def whole(self):
        return 12 * self.run.layers * self.run.hidden * self.run.seq

    def causal(self):
        return self.whole() / 2

    def six(self):
        return 6

    def token(self):
        return {
            "full": lambda: self.six() * self.products() + self.whole(),
            "causal": lambda: self.six() * self.products() + self.causal(),
            "parameters": lambda: self.six() * self.parameters(),
            "palm": lambda: self.six() * self.parameters() + self.whole(),
        }[self.convention]()

    def tokens(self):
        return self.run.sequences * self.run.accumulate * self.run.replicas * self.run.seq

    def chips(self):
        return self.run.replicas * self.run.chips

    def dtype(self):
        return self.run.products_dtype

    def peak(self):
        row = self.sheet[self.dtype()]
        return row.flops / 2 if row.sparse else row.flops


class RightLost:
    def __call__(self, operators, needed, peak, bandwidth):
        self.operators, self.needed, self.peak, self.bandwidth = operators, needed, peak, bandwidth
        return self.form([self.lost(one) for one in operators], self.saved())

    def form(self, lost, saved):
        return lost, saved

    def moved(self, one):
        return sum(one.reads.values()) + sum(one.writes.values())

    def takes(self, one):
        return max(one.flops / self.peak, self.moved(one) / self.bandwidth)

    def lost(self, one):
        return self.takes(one) - one.flops / self.peak

    def runs(self):
        """From and to."""
        at, found = 0, []
        for product, run in groupby(self.operators, self.ends):
            size = len(list(run))
            found += [] if product else [(at, at + size)]
            at += size
        return found

    def ends(self, one):
        return one.flops > 0

    def saved(self):
        return sum(self.before(*run) - self.after(*run) for run in self.runs()) / self.bandwidth

    def before(self, start, end):
        return sum(map(self.moved, self.operators[start:end]))

    def after(self, start, end):
        run, behind = self.operators[start:end], self.operators[end:]
        made = {name: size for one in run for name, size in one.writes.items()}
        return self.read(run, made) + self.written(run, behind, made)

    def read(self, run, made):
        return sum({name: size for one in run for name, size in one.reads.items() if name not in made}.values())

    def written(self, run, behind, made):
        later = {*self.needed, *(name for one in behind for name in one.reads)}
        return sum(size for name, size in made.items() if name in later)
