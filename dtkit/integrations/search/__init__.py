"""Search for hyper-parameters: each trial on one engine, driven from the notebook by ``cluster.search``.

`driver` has :func:`search`. `studies` chooses parameters: by Optuna's sampler and pruner, or from a list of choices.
`channel` connects a trial on an engine with its trial in the notebook.
"""

from dtkit.integrations.search.result import SearchResult, get_last_result
from dtkit.integrations.search.trial import Trial, TrialPruned
from dtkit.integrations.search.trial_record import TrialRecord

__all__ = ["SearchResult", "Trial", "TrialPruned", "TrialRecord", "get_last_result"]
