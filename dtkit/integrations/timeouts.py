"""Time constants that only other frameworks need, in seconds. All others are in `_util/timeouts.py`."""

from __future__ import annotations

# -- experiment trackers ------------------------------------------------------------------------------------------

TRACKER_INTERVAL_S = 2.0
"""Period of writing a run's records to an experiment tracker."""
TRACKER_OPEN_TIMEOUT_S = 15.0
"""Delay of a training's first step until a tracker is open; a slower one is opened meanwhile."""
TRACKER_TIME_CREDIT_S = 0.01
"""Time that a tracker may take at once, beyond its share. More would slow the first seconds of a run."""
TRACKER_STEP_S = 0.002
"""Assumed time to write a step, until it is measured."""
TRACKER_LAST_WRITE_S = 3.0
"""Time for records that a tracker has not received when the run ends."""

# -- searches for hyper-parameters --------------------------------------------------------------------------------

SEARCH_POLL_S = 0.02
"""Polling period for the questions of trials on engines, and for their answers."""
SEARCH_ANSWER_TIMEOUT_S = 60.0
"""Limit for the notebook to answer a trial, whose sampler may compute for a while."""

# -- boosted trees and joblib -------------------------------------------------------------------------------------

XGBOOST_TRACKER_TIMEOUT_S = 60.0
"""Limit for all ranks to meet at XGBoost's tracker."""
XGBOOST_COLLECTIVE_TIMEOUT_S = 60.0
"""Limit for one of XGBoost's own collectives. A lost rank is noticed earlier, by its closed connection."""
JOBLIB_ABORT_TIMEOUT_S = 60.0
"""Limit for the end of joblib's tasks, whose engines may have to be replaced."""

# -- Horovod's interface ------------------------------------------------------------------------------------------

HOROVOD_CYCLE_S = 0.001
"""Pause between two cycles of a negotiation, and between two looks of a rank that joined."""
HOROVOD_JOIN_POLL_S = 0.05
"""Time after which a waiting operation looks for joined ranks, and between two such looks."""
HOROVOD_LOSS_CHECK_S = 1.0
"""Time after which a waiting operation looks whether other ranks form a new group, after the loss of one."""
HOROVOD_STALL_TIMEOUT_S = 60.0
"""Limit in the strict mode for an operation that other ranks have not submitted."""
HOROVOD_STOP_TIMEOUT_S = 2.0
"""Limit for operations that still run at a shutdown."""
HOROVOD_RESET_TIMEOUT_S = 60.0
"""Limit for all ranks to form a new group after an error under `elastic.run`, from the arrival of the last one."""
HOROVOD_MEETING_TIMEOUT_S = 1800.0
"""Limit for all ranks to arrive. Some may compute for long, or start on a new engine; a failed script ends the wait."""
