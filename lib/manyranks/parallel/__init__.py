"""Floor 3: the techniques, one file each, in plain torch.distributed; each also runs under torchrun."""
