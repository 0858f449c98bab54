"""Pipeline parallelism: where to cut a model, its stages, and how they run."""
