"""Ranks on the nodes of a Ray cluster: what the notebook does to start them, and a handle on each."""

import contextlib
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator

from manyranks.world.errors import NODE_LOST, WorldError
from manyranks.world.processes import ray_nodes
from manyranks.world.processes.handle import RankProcess

_ANSWERING = 10.0  # seconds for an actor that has nothing to do
_CONNECTING = 60.0  # seconds until a rank's channels must be there


class RemoteRank(RankProcess):
    """A rank whose process is on another node: signals travel by its actor."""

    gone = NODE_LOST

    def __init__(self, rank: int, node, channels: dict[str, socket.socket]):
        pipes = {name: channels[name].detach() for name in ray_nodes.PIPES}
        super().__init__(rank, channels["command"], channels["control"], pipes)
        self._node, self._told = node, False

    def send_signal(self, number: int) -> None:
        if self.pid and self.poll() is None:
            self._signal(number)

    def kill(self) -> None:
        if self.pid and self.poll() is None:
            self._signal(signal.SIGKILL)
        self.hang_up()

    def _signal(self, number: int) -> None:
        if not self._told:
            self._node.told.remote(self.rank, self.pid)
            self._told = True
        self._node.signal.remote(self.rank, number)


class RayServer:
    """The ranks' places on a cluster, for one world. It is asked for ranks as a forkserver is."""

    pid = None  # its processes are on other machines

    def __init__(self, size: int):
        """Raises ValueError without Ray, without a cluster, and where it has too few CPUs."""
        self._ray = ray = _connected()
        mine = ray.get_runtime_context().get_node_id()
        self._nodes = list(_dealt(ray, size, mine))
        self._listener = socket.create_server((_addresses(ray)[mine], 0), backlog=size * len(ray_nodes.CHANNELS))
        self._listener.settimeout(_CONNECTING)
        self._secret = secrets.token_bytes(16)
        ranks = Counter(node["NodeID"] for node in self._nodes)
        self._actors = {node: self._actor(node, count) for node, count in ranks.items()}

    def wait_until_ready(self) -> None:
        """Returns when every node has imported torch. Raises WorldError if one does not."""
        try:
            self._ray.get([actor.__ray_ready__.remote() for actor in self._actors.values()], timeout=_CONNECTING)
        except Exception as error:
            raise WorldError(
                f"Ray could not start ranks: {type(error).__name__}: {error}. Has something else taken the cluster's CPUs?"
            ) from error

    def meeting_place(self, folder: str | None = None) -> str:
        first = self._nodes[0]
        port = self._ray.get(self._actors[first["NodeID"]].free_port.remote(), timeout=_CONNECTING)
        return f"tcp://{first['NodeManagerAddress']}:{port}"

    def fork(self, rank: int) -> RemoteRank:
        """A new process with nothing set up yet. Raises WorldError if there can be none."""
        actor = self._actors[self._nodes[rank]["NodeID"]]
        forked = actor.fork.remote(rank)
        try:
            channels = dict(self._accepted(rank) for _ in ray_nodes.CHANNELS)
            self._ray.get(forked, timeout=_CONNECTING)
        except Exception as error:
            raise WorldError(f"rank {rank} could not be started: {type(error).__name__}: {error}") from error
        return RemoteRank(rank, actor, channels)

    def changed_environment(self) -> dict[str, str | None]:
        return {}

    def clock(self) -> float:
        return time.perf_counter()

    def alive(self) -> bool:
        try:
            self._ray.get([actor.__ray_ready__.remote() for actor in self._actors.values()], timeout=_ANSWERING)
        except Exception:  # a node or its actor is gone, or Ray itself
            return False
        return True

    def release(self) -> None:
        """Ends the actors, and their ranks with them."""
        self._listener.close()
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def _accepted(self, rank: int) -> tuple[str, socket.socket]:
        """A channel of this rank; who does not know the secret is turned away."""
        deadline = time.monotonic() + _CONNECTING
        while time.monotonic() < deadline:
            connection, _ = self._listener.accept()
            connection.settimeout(_ANSWERING)
            said = b""
            with contextlib.suppress(OSError):  # who says nothing is a stranger, too
                said = connection.recv(ray_nodes.HELLO.size, socket.MSG_WAITALL)
            if len(said) == ray_nodes.HELLO.size:
                secret, who, number = ray_nodes.HELLO.unpack(said)
                if secrets.compare_digest(secret, self._secret) and who == rank:
                    connection.settimeout(None)
                    return ray_nodes.CHANNELS[number], ray_nodes.patient(connection)
            connection.close()
        raise TimeoutError("its channels did not come")

    def _actor(self, node: str, ranks: int):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node, soft=False)
        kind = self._ray.remote(num_cpus=ranks, scheduling_strategy=where, max_restarts=0)(ray_nodes.Node)
        return kind.remote(self._listener.getsockname(), self._secret, _addresses(self._ray)[node])


def _connected():
    try:
        import ray
    except ImportError:
        raise ValueError("engine='ray' needs Ray: pip install 'manyranks[ray]', or leave engine out") from None
    if not ray.is_initialized():
        raise ValueError("engine='ray': connect to a cluster first, ray.init(address='auto'), or ray.init() for this machine")
    return ray


def _addresses(ray) -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _dealt(ray, size: int, mine: str) -> Iterator[dict]:
    """The node of each rank: one after the other is filled, the notebook's own first, a CPU a rank.

    Raises ValueError where there are too few.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    room = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}
    if (there := sum(room.values())) < size:
        raise ValueError(f"World({size}, engine='ray') needs {size} CPUs, one a rank; the cluster has {there}")
    places = [
        node
        for node in sorted(alive, key=lambda node: (node["NodeID"] != mine, node["NodeID"]))
        for _ in range(room[node["NodeID"]])
    ]
    yield from places[:size]
