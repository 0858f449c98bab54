"""Scikit-learn's estimators, fitted on shards of the rows: the same results as on all rows in one process.

Each estimator is scikit-learn's class of the same name with a `fit` of its own. With ``cluster=`` a cluster, `fit`
takes arrays or what `cluster.partition` returned. Sums travel by all-reduce. Without, it runs in this process.
"""

from dtkit.integrations.sklearn.kmeans import KMeans
from dtkit.integrations.sklearn.least_squares import LinearRegression, Ridge
from dtkit.integrations.sklearn.logistic import LogisticRegression
from dtkit.integrations.sklearn.naive_bayes import GaussianNB
from dtkit.integrations.sklearn.pca import PCA
from dtkit.integrations.sklearn.scaler import StandardScaler
from dtkit.integrations.sklearn.statistics import Statistics

__all__ = [
    "PCA",
    "GaussianNB",
    "KMeans",
    "LinearRegression",
    "LogisticRegression",
    "Ridge",
    "StandardScaler",
    "Statistics",
]
