"""joblib on engines: parallel work of scikit-learn (`n_jobs`) inside ``with cluster.joblib():``."""
