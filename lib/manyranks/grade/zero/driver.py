"""What exercise 03 gives to its learners: a model of layers, and a schedule that gathers one unit at a time.

The notebook shows both classes as they stand here.
"""

from functools import partial

import torch


class Sharded(torch.nn.Module):
    """Layers, one after the other. A schedule gathers, frees and reduces their units."""

    def __init__(self, layers, schedule):
        super().__init__()
        self.layers, self.schedule = layers, schedule

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            self.schedule.before_forward(k)
            x = layer(x)
            self.schedule.after_forward(k)
            x.register_hook(partial(self.arrived, k))
        return x

    def arrived(self, k, grad):
        """The gradient of layer k's output is there: layer k + 1 is done, k is next."""
        if k + 1 < len(self.layers):
            self.schedule.after_backward(k + 1)
        self.schedule.before_backward(k)

    def finish(self):
        self.schedule.after_backward(0)


class OneAtATime:
    """Each unit is gathered when it is needed, and freed when it has computed."""

    def __init__(self, units):
        self.units = units

    def before_forward(self, k):
        self.units[k].start()
        self.units[k].wait()

    def after_forward(self, k):
        self.units[k].free()

    def before_backward(self, k):
        self.units[k].start()
        self.units[k].wait()

    def after_backward(self, k):
        self.units[k].reduce()
        self.units[k].free()
