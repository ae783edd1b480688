"""Floating-point operations of training, from the size of the model."""


def training(parameters: float, tokens: float) -> float:
    """6Φ FLOPs a token: 2Φ forward, 4Φ backward; attention's own matmuls are left out.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", arXiv 2001.08361, section 2.1.
    """
    if parameters < 0 or tokens < 0:
        raise ValueError(f"parameters={parameters}, tokens={tokens}: neither can be negative")
    return 6 * parameters * tokens
