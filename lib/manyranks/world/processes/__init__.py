"""The notebook's side of ranks' processes: they start, are asked, and end, on this machine or on a Ray cluster."""
