"""Scikit-learn's estimators, fitted on shards of the rows, with the results of one process with all rows.

Each estimator is scikit-learn's class of the same name with a `fit` of its own. With ``cluster=``, `fit` takes arrays
or the result of `cluster.partition`, and sums over ranks by all-reduce. Without, it runs in this process.
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
