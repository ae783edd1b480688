"""A quorum per step: replicas that die anywhere in a step, are late, or come back."""

import os
import signal
import threading
import time

import pytest
import torch

import manyranks as mr
from manyranks.parallel import quorum
from manyranks.parallel.precision import make_states
from tests.conftest import gone, pids, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:a message was sent that nobody received")
STEPS = 6
PATIENCE = 4.0  # far more than processes that share a busy machine drift apart
TIMEOUT = 120


def part(name: str, step: int) -> torch.Tensor:
    """The numbers that a replica draws for a step."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + ord(name)), dtype=torch.float64)


def made():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    make_states(optimizer)
    states = [t for p in model.parameters() for t in optimizer.state[p].values()]
    return model, optimizer, [p.data for p in model.parameters()] + states


def replica(port, name, dies=(), waits=None, late=None, timeout=60.0, **how):
    """Trains; returns the members of each step, by their first letters, the step it began with, its state, and refusals.

    dies: ("before" | "in" | "after", step)
    waits: before this step it tells others to come, and waits for a newcomer
    late: the step that it's away for, until it's told to come
    timeout: seconds that it waits for a quorum, after it was late
    """
    own = quorum.Quorum(quorum.client(port), name, **{"replicas": 3, "patience": PATIENCE} | how)
    own.timeout = 60.0 if late else timeout
    model, optimizer, state = made()
    if ord(name) % 2:
        model.weight.data += 1  # replicas needn't begin with the same weights
    where, step = dies or ("", None)
    reduce, seen, refused = own._sum, [], 0

    def dying(mine, total):
        if own.step == step and where == "in":
            own._group.allreduce([total])
        if own.step != step or where == "after":
            reduce(mine, total)
        if own.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    own._sum = dying
    while own.step < STEPS:
        while own.step == waits and not own.newcomers():
            own.store.set("come", "")
            time.sleep(0.01)
        own.meet(state)
        optimizer.zero_grad()
        model(part(name, own.step)).square().mean().backward()
        while own.step == late and not own.store.check(["come"]):
            time.sleep(0.01)
        if own.step == late:
            own.timeout = timeout
        if own.average([p.grad for p in model.parameters()]):
            optimizer.step()
            seen.append("".join(member[0] for member in own.members))
        else:
            refused += 1
    return seen, STEPS - len(seen), [tensor.clone() for tensor in state], refused


def alone(members: list[str]) -> list[torch.Tensor]:
    """One process averages over the same members."""
    model, optimizer, state = made()
    model.weight.data += 1  # as "a" begins
    for step, there in enumerate(members):
        optimizer.zero_grad()
        sum(model(part(name, step)).square().mean() for name in there).div(len(there)).backward()
        optimizer.step()
    return state


class Replicas:
    """A world for each, and a thread that waits for it."""

    def __init__(self):
        self.store, self.worlds, self.threads, self.out = quorum.lighthouse(), {}, {}, {}

    def start(self, name: str, **how):
        self.worlds.setdefault(name, mr.World(1, backend="gloo", timeout=TIMEOUT))

        def drive():
            try:
                self.out[name] = self.worlds[name].run(replica, self.store.port, name, **how)[0]
            except mr.WorldError as error:
                self.out[name] = error

        self.threads[name] = threading.Thread(target=drive)
        self.threads[name].start()

    def end(self, *names) -> dict:
        for name in names or self.threads:
            self.threads[name].join()
        return self.out


@pytest.fixture
def replicas():
    made = Replicas()
    for name in "abc":
        made.worlds[name] = mr.World(1, backend="gloo", timeout=TIMEOUT)
    processes = [pid for world in made.worlds.values() for pid in pids(world)]
    yield made
    made.end()
    for world in made.worlds.values():
        world.close()
    assert wait_until(lambda: all(gone(pid) for pid in processes), TIMEOUT)


def assert_as_one_process(found: dict, members: list[str]) -> None:
    whole = alone(members)
    for seen, first, state, _ in found.values():
        assert seen == members[first:]
        assert all(map(torch.equal, state, next(iter(found.values()))[2]))
        assert all(torch.allclose(mine, one, rtol=1e-11, atol=1e-13) for mine, one in zip(state, whole, strict=True))


def test_a_lighthouse_is_reached_by_the_name_that_it_was_started_with():
    store = quorum.lighthouse("localhost")
    store.set("state", "there")
    assert quorum.client(store.port, "localhost").get("state") == b"there"


def test_replicas_that_stay_are_one_process(replicas):
    for name in "abc":
        replicas.start(name)
    assert_as_one_process(replicas.end(), ["abc"] * STEPS)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_step_ends_without_a_replica_that_dies_in_it(replicas, where, step):
    for name in "abc":
        replicas.start(name, dies=(where, step) if name == "b" else ())
    found = replicas.end()
    assert isinstance(found.pop("b"), mr.RankDied)
    assert_as_one_process(found, ["abc"] * step + ["ac"] * (STEPS - step))


def test_a_replica_that_comes_back_gets_the_state_and_joins(replicas):
    for name in "abc":
        replicas.start(name, dies=("before", 1) if name == "b" else (), waits=4)
    assert isinstance(replicas.end("b")["b"], mr.RankDied)
    replicas.store.wait(["come"])
    replicas.start("b")
    found = replicas.end()
    assert found["b"][1] == 4
    assert_as_one_process(found, ["abc", "ac", "ac", "ac", "abc", "abc"])


def test_a_replica_that_is_late_is_left_out_of_the_step_and_joins_again(replicas):
    for name in "abc":
        replicas.start(name, **{"late": 2} if name == "c" else {"waits": 4})
    found = replicas.end()
    assert found["a"][0] == ["abc", "abc", "ab", "ab", "abc", "abc"]
    assert found["c"][0] == ["abc", "abc", "abc", "abc"]
    assert found["c"][3] == 1
    assert all(map(torch.equal, found["a"][2], found["c"][2]))


def test_fewer_than_the_minimum_refuse_and_say_why(replicas):
    for name in "abc":
        replicas.start(name, least=2, **{"late": 1, "timeout": 1.0} if name == "a" else {"dies": ("before", 1)})
    replicas.end("b", "c")
    replicas.store.set("come", "")
    error = replicas.end()["a"]
    assert isinstance(error, mr.RankFailed)
    assert "no quorum in 1.0 s: a.1 came. It takes 2 or more" in str(error)


def test_a_newcomer_doesn_t_train_from_nothing_when_all_others_are_gone(replicas):
    for name in "ab":
        replicas.start(name, dies=("before", 1), replicas=2)
    replicas.end()
    replicas.start("c", timeout=1.0)
    assert "one of them from the last round and with the state" in str(replicas.end("c")["c"])
