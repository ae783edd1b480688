"""What chapter 08's explorer shows of a setting: a step's time and its parts, a GPU's memory, a layer's way to the experts."""

import functools
from dataclasses import replace
from typing import NamedTuple

from manyranks.theory import ModelShape, Plan, clusters, expert, layer, memory, models, step, traffic
from manyranks.theory.cluster import Cluster
from manyranks.theory.kernels import DEFAULT
from manyranks.theory.names import Named


class Run(NamedTuple):
    """How a model is trained, whatever the degrees are. batch: sequences of a step."""

    gpus: int
    seq: int
    batch: int
    precision: str


# DeepSeek-V3: arXiv 2412.19437, sections 3 and 4.2; V2's batch: arXiv 2405.04434, section 3.1.2. The rest are round numbers.
MODELS = Named(
    "model",
    {
        "deepseek-v3": Run(2048, 4096, 15360, "fp8"),
        "deepseek-v2": Run(1024, 4096, 9216, "bf16"),
        "qwen3-235b-a22b": Run(1024, 4096, 4096, "bf16"),
        "mixtral-8x22b": Run(512, 4096, 2048, "bf16"),
        "mixtral-8x7b": Run(256, 4096, 1024, "bf16"),
    },
)
_NVL = "gb200, 64 of a rack's 72"
CLUSTERS = ("h800", "h100-dgx", "a100-dgx", "b200-dgx", _NVL, "tpu-v5p")
PIPELINE, EXPERT, TENSOR = [2**k for k in range(6)], [2**k for k in range(8)], [1, 2, 4, 8]
NO_LIMIT = 0
LIMITS = (NO_LIMIT, 4, 2, 1)  # nodes that a token may reach
IMBALANCE = (1, 1.1, 1.2, 1.5, 2, 3, 4)
SCHEDULES = ("dualpipe", "zb-v", "1f1b")


class Way(NamedTuple):
    """Of one layer and micro-batch, forward: bytes that a GPU sends to experts and gets back, and the seconds of both."""

    inside: float
    between: float
    seconds: float


class Setting(NamedTuple):
    """What the controls say. ep: as asked; with fewer data-parallel ranks or experts it is as many as these."""

    model: str
    cluster: str
    pp: int
    ep: int
    tp: int
    limit: int
    imbalance: float
    schedule: str

    @property
    def run(self) -> Run:
        return MODELS[self.model]

    @property
    def on(self) -> Cluster:
        return _cluster(self.cluster)

    @property
    def dp(self) -> int:
        """Raises ValueError for more pipeline and tensor ranks than there are GPUs."""
        dp, left = divmod(self.run.gpus, self.pp * self.tp)
        if left or not dp:
            raise ValueError(f"PP {self.pp} × TP {self.tp} on {self.run.gpus} GPUs: lower one of them")
        return dp

    @property
    def most(self) -> tuple[int, str]:
        """The largest e that there can be, and why."""
        dp, experts = self.dp, models[self.model].experts
        return min((dp, f"{dp} DP ranks"), (experts, f"{experts} experts"))

    @property
    def ranks(self) -> int:
        """e: those that share the experts."""
        return min(self.ep, self.most[0])

    @property
    def nodes(self) -> int:
        """Over which these are spread."""
        return self.ranks // self.on.route(self.ranks, self.tp).inside

    @property
    def shape(self) -> ModelShape:
        """With the experts of a node as a group, where a token may not reach all nodes.

        Raises ValueError where those that it may reach have too few experts.
        """
        nodes, whole = self.nodes, models[self.model]
        if whole.experts % self.ranks or not 0 < self.limit < nodes:
            return _shape(self.model, 1, 1)
        if (found := whole.experts // nodes * self.limit) < whole.top_k:
            raise ValueError(
                f"{self.limit} of {nodes} nodes for a token that takes {whole.top_k} experts: they have {found}; allow more"
            )
        return _shape(self.model, nodes, self.limit)

    @property
    def plan(self) -> Plan:
        run = self.run
        degrees = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "ep": self.ranks}
        return Plan(**degrees, seq=run.seq, batch=run.batch, precision=run.precision, schedule=self.schedule)

    @property
    def worst(self) -> float:
        """The largest imbalance that can be."""
        shape = models[self.model]
        return expert.worst(shape.experts, shape.top_k, self.ranks)

    def step(self) -> step.StepTime:
        """Raises ValueError for degrees that the model does not allow, and an imbalance that cannot be."""
        return _step(self)

    def parts(self) -> dict[str, float]:
        """Seconds of a step, its parts those of a balanced load: what an unequal one adds is a part of its own."""
        balanced = self._replace(imbalance=1).step()
        named = {name: getattr(balanced, name) for name in ("compute", "tensor", "expert", "bubble")}
        waits = self.step().seconds - balanced.seconds
        return named | {"waits": max(0.0, waits), "rest": balanced.seconds - sum(named.values())}

    def peak(self) -> memory.Peak:
        """Of the fullest GPU, with a balanced load."""
        return _peak(self)

    @property
    def possible(self) -> bool:
        """Whether the model allows these degrees."""
        try:
            self.plan.check(self.shape)
        except ValueError:
            return False
        return self.ranks == self.ep and self.imbalance <= self.worst

    @property
    def fits(self) -> bool:
        return self.peak().total <= self.on.accelerator.memory

    def way(self, hops: int = 2) -> Way:
        """With one hop a copy goes to the rank of each expert; with two one goes to each node, and is copied there."""
        return _way(self, hops)


@functools.cache
def _cluster(name: str) -> Cluster:
    return clusters["gb200-nvl72"].with_nodes_of(64) if name == _NVL else clusters[name]


@functools.cache
def _shape(model: str, groups: int, chosen: int) -> ModelShape:
    return replace(models[model], expert_groups=groups, groups_per_token=chosen)


@functools.lru_cache(maxsize=16384)
def _step(now: Setting) -> step.StepTime:
    return step.estimate(now.shape, now.plan, now.on, imbalance=now.imbalance)


@functools.lru_cache(maxsize=16384)
def _peak(now: Setting) -> memory.Peak:
    return memory.peak(models[now.model], now.plan)


@functools.lru_cache(maxsize=16384)
def _way(now: Setting, hops: int) -> Way:
    if now.ranks == 1:
        return Way(0.0, 0.0, 0.0)
    shape, plan, route = now.shape, now.plan, now.on.route(now.ranks, now.tp)
    groups = shape.expert_groups, shape.groups_per_token
    copies_of = expert.one_hop_copies if hops == 1 else expert.two_hops_copies
    copies = copies_of(shape.experts, shape.top_k, now.ranks, now.nodes, *groups)
    row = now.imbalance * layer.split_tokens(plan) * shape.hidden
    there, back = (row * size for size in (min(traffic.HALF, plan.recipe.matmul), traffic.HALF))
    near, far = (traffic.reached(link, DEFAULT).bandwidth for link in (route.near, route.pair))
    start = DEFAULT.overhead + route.pair.latency
    seconds = sum(start + max(copies.inside * size / near, copies.between * size / far) for size in (there, back))
    return Way(copies.inside * (there + back), copies.between * (there + back), seconds)
