"""joblib on engines: what scikit-learn runs with `n_jobs`, inside ``with cluster.joblib():``."""
