"""Floor 4: the small GPT, its corpus and the trainer that composes every axis."""
