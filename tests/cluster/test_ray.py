"""Ranks on a Ray cluster: a real one, with two nodes on this machine. They do what local ranks do."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.theory import Plan
from manyranks.training import GPTConfig, Trainer, TrainingConfig
from manyranks.training.__main__ import main
from manyranks.world.errors import NODE_LOST
from manyranks.world.processes import ray_engine
from tests.cluster.tasks import dies, fails, speak, total, waits_in_a_ring, where
from tests.conftest import gone, wait_until

# Ray reads these when it is imported: everything on the loopback, as on macOS, and nothing told to anybody.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"RAY_health_check_period_ms": "1000"}  # a node is lost after five looks in vain: one a second, not one in three
ray = pytest.importorskip("ray", reason="needs Ray: pip install 'manyranks[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

HERE = {"node_ip_address": "127.0.0.1", "num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20}


class Nodes:
    """A cluster of a head with 2 CPUs and a second node with 2."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=HERE | {"include_dashboard": False})
        self.second = self.cluster.add_node(**HERE)
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, _node_ip_address="127.0.0.1", log_to_driver=False, logging_level="ERROR")

    def lose_the_second(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def started(tries: int = 3) -> Nodes:
    """Ray gives up where its own processes take longer than 15 s to start, as they may on a slow machine."""
    for _ in range(tries - 1):
        try:
            return Nodes()
        except Exception:
            ray.shutdown()
    return Nodes()


@pytest.fixture(scope="module")
def nodes():
    nodes = started()
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def world(nodes):
    with mr.World(4, engine="ray", timeout=60) as world:
        yield world


@pytest.fixture
def free(nodes, world):
    """The cluster when the world above, which has all its CPUs, is over: tests that need it come last."""
    world.close()
    return nodes


def test_ranks_are_dealt_to_the_nodes_and_are_one_group(world):
    answers = world.run(where)
    assert [answer[1:] for answer in answers] == [(rank, 4, "lo") for rank in range(4)]
    parents = [answer[0] for answer in answers]
    assert parents[0] == parents[1] != parents[2] == parents[3]  # a forkserver on each node
    for x in world.run(total):
        assert torch.equal(x, torch.arange(1000.0) * 6)


def test_a_run_is_measured_as_on_local_ranks(world):
    there = world.measure(total, flops=True, memory=True)
    with mr.World(4) as local:
        here = local.measure(total, flops=True, memory=True)
    for name in ("payload_bytes", "flops", "peak_bytes", "divergence"):
        assert getattr(there, name) == getattr(here, name), name
    assert [[(c.op, c.bytes, c.ranks) for c in there.calls[r]] for r in range(4)] == [
        [(c.op, c.bytes, c.ranks) for c in here.calls[r]] for r in range(4)
    ]
    assert there.sent_bytes == here.sent_bytes  # and nothing of the store that Ray's ranks meet at


def test_large_results_and_what_ranks_print_come_whole(world, capfd):
    for rank, x in enumerate(world.run(speak)):
        assert x.shape == (3_000_000,)
        assert (x == rank).all()
    said = capfd.readouterr().out
    assert all(f"rank {rank} is here" in said for rank in range(4))


def test_the_clocks_of_all_ranks_show_the_kernels_time(world):
    before = time.perf_counter()
    shown = world.run(lambda: (time.perf_counter(), type(time.perf_counter).__name__))
    assert all(before - 1 < moment < time.perf_counter() for moment, _ in shown)
    assert [kind for _, kind in shown] == ["function"] * 4, "here all have one clock; that it was set, its kind says"


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (fails, mr.RankFailed, "rank 3 raised KeyError: 'no such layer'"),
        (dies, mr.RankDied, "rank 2 died"),
        (waits_in_a_ring, mr.RankHung, "the ranks wait for each other and nothing moves: a deadlock"),
    ],
    ids=["raises", "dies", "deadlock"],
)
def test_failures_read_as_on_local_ranks_and_the_next_run_works(world, function, kind, said):
    with pytest.raises(kind) as caught:
        world.run(function)
    assert said in str(caught.value)
    if kind is mr.RankDied:
        assert caught.value.exit_code == 3
    assert [int(x[1]) for x in world.run(total)] == [6] * 4


def test_the_trainer_trains_as_on_local_ranks(world):
    def trained():
        plan = Plan(dp=2, tp=2, seq=32, batch=4, microbatch=2, zero=0, recompute="none", precision="fp32")
        return Trainer(GPTConfig(layers=2, hidden=32, seq=32), TrainingConfig(steps=2, batch=4, plan=plan)).run()

    there = world.run(trained)
    with mr.World(4) as local:
        here = local.run(trained)
    assert there == here


def test_the_command_trains_on_the_cluster(free, monkeypatch, capsys):
    monkeypatch.setattr(ray, "init", lambda **_: None)  # it is connected already
    small = ["--layers", "1", "--hidden", "32", "--seq", "32", "--batch", "2", "--steps", "2", "--dp", "2"]
    main([*small, "--ray", "auto"])
    there = capsys.readouterr().out
    main(small)
    assert there.rpartition(" in ")[0] == capsys.readouterr().out.rpartition(" in ")[0]


def test_more_ranks_than_cpus_are_refused_before_any_starts(free):
    with pytest.raises(ValueError, match="needs 5 CPUs, one a rank; the cluster has 4"):
        mr.World(5, engine="ray")


def test_without_a_cluster_the_world_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"connect to a cluster first, ray.init"):
        mr.World(2, engine="ray")


def test_a_stranger_at_the_door_is_turned_away(monkeypatch, free):
    """A program that connects to the kernel without the world's secret gets no channel."""
    accepted = []
    accept = ray_engine.RayServer._accepted

    def with_a_stranger(server, rank):
        if not accepted:
            accepted.append(socket.create_connection(server._listener.getsockname()))
            accepted[0].sendall(bytes(24))
        return accept(server, rank)

    monkeypatch.setattr(ray_engine.RayServer, "_accepted", with_a_stranger)
    world_of_one = mr.World(1, engine="ray")
    assert world_of_one.run(dist.get_world_size) == [1]
    world_of_one.close()
    accepted[0].close()


def test_a_lost_node_is_a_dead_rank_and_a_world_of_what_is_left_works(free):
    """Last: the cluster is not what it was."""
    with mr.World(4, engine="ray", timeout=60) as world:
        ranks = world.run(os.getpid)
        lost = [rank for rank, node in enumerate(world._servers[0]._nodes) if node["NodeID"] == free.second.node_id]
        assert lost in ([0, 1], [2, 3])
        threading.Timer(1.0, free.lose_the_second).start()
        with pytest.raises(mr.RankDied, match="with its node") as caught:
            world.run(time.sleep, 50)
        assert caught.value.exit_code == NODE_LOST
        assert caught.value.rank in lost
        assert wait_until(lambda: all(gone(pid) for pid in ranks), 20)
        assert wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, 60)  # Ray needs a while to notice
        with pytest.raises(ValueError, match="the cluster has 2"):
            world.run(total)
    with mr.World(2, engine="ray") as rest:
        assert [int(x[1]) for x in rest.run(total)] == [1, 1]
