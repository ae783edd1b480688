"""Floor 5: the checks that exercises call: numerics, traffic, memory and order."""
