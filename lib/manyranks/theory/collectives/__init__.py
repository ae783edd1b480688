"""Collectives: the messages of each algorithm, the bytes each rank sends, and the seconds they take.

messages: what a message is, how a tensor is cut; algorithms: the rounds of messages, and all else follows from them;
traffic: bytes; timing: seconds on equal links of latency α and bandwidth β, on nodes with the network between them and
on a torus, and the rates of nccl-tests; contents: what each rank holds after some rounds.

`bytes` and `elements` always count the whole tensor, where it is whole: the input of all_reduce, reduce,
reduce_scatter, broadcast and scatter, the output of all_gather and gather, one rank's input of all_to_all.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
