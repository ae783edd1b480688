"""A rank's process: what it runs, answers, shows and notes."""
