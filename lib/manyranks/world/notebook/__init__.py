"""A run as the notebook shows it: ranks' output, their progress, and a debugger's prompt."""
