"""Scripts that make models. Each runs in the environment of an engine that can."""
