"""Pipeline parallelism: cutting a model into stages, and running these."""
