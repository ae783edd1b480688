"""Functions that ranks on the cluster run, in their own module: each rank imports it, and nothing else of the tests."""

import os

import torch
import torch.distributed as dist


def total():
    x = torch.arange(1000.0) * dist.get_rank()
    dist.all_reduce(x)
    return x


def where():
    return os.getppid(), dist.get_rank(), dist.get_world_size(), os.environ["GLOO_SOCKET_IFNAME"]


def speak():
    print(f"rank {dist.get_rank()} is here")
    return torch.full((3_000_000,), dist.get_rank(), dtype=torch.int32)


def fails():
    if dist.get_rank() == 3:
        raise KeyError("no such layer")
    dist.all_reduce(torch.ones(4))


def dies():
    if dist.get_rank() == 2:
        os._exit(3)
    dist.all_reduce(torch.ones(4))


def waits_in_a_ring():
    dist.recv(torch.ones(1), src=(dist.get_rank() + 1) % 4)
