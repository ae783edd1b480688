"""PyTorch 2.13 gave two collectives new names. Importing this gives them to older versions, too."""

import torch.distributed as dist

for new, old in (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")):
    if not hasattr(dist, new):
        setattr(dist, new, getattr(dist, old))
