"""Every time constant of dtkit, in seconds. `tests/test_timeouts.py` checks the relations of this table.

Use them as ``timeouts.NAME``, so that a test that changes one reaches all uses.

====================== =========================================================================================
what                   in order
====================== =========================================================================================
an engine is stopped   watchdog sample < status too old to judge < watchdog silent < stall reported < heartbeat lost
                       < 10 s, after which no call may still be silent
a rank fails           grace for the other ranks < heartbeat lost < gathering of late replies < reforming the group
a call takes too long  stalled predecessor < wait for a call's turn < collective's limit; the notebook waits longer
                       than the engines' own limit, by more than the grace before and after an interrupt
a pause                grace + interrupt + grace <= 3 s where steps are short
a dispatch             slow step < target < forced end < stall reported
a notebook ends        reaper's poll < lease < lease while a job trains
a cluster closes       SIGTERM's grace + SIGKILL < wait for the reaper
a checkpoint           poll < no progress < wait for the previous save < age of an abandoned folder
a display              update of the page < picture of a panel
====================== =========================================================================================
"""

from __future__ import annotations

# -- engine processes: is it alive, is it stuck -----------------------------------------------------------------

HEARTBEAT_PERIOD_S = 0.5
"""Controller's heartbeat. New engines are registered on a beat, so a longer one delays each start."""
HEARTBEAT_TIMEOUT_S = 8.0
"""Silence after which an engine is given up. Only stopped engines need it: the end of a process is known at once."""
WATCHDOG_PERIOD_S = 0.5
"""Between two samples of an engine's watchdog, each of which costs the engine a fraction of a millisecond."""
WATCHDOG_MISSED_SAMPLE_S = 1.25
"""Gap between two samples from which the watchdog concludes that its process was stopped."""
MAX_STATUS_AGE_S = 1.25
"""Age from which a status may be an engine's last one, so that nothing is concluded from it."""
WATCHDOG_SILENT_S = 2.5
"""Age of a status from which its engine can't write: C code holds its interpreter, or it is stopped."""
STALL_LIMIT_S = 5.0
"""Shortest delay of a dispatch before its ranks are compared; longer than any status of before it is valid."""
ALL_RANKS_STALL_LIMIT_S = 30.0
"""The same where all ranks are alike: a long step, or the compilation of the first one, is no rank's fault."""
STRAGGLER_HOLDOFF_S = 5.0
"""After a recovery: by then, no sample that the watchdogs count is from the stall."""
FRESH_STATUS_TIMEOUT_S = 1.5
"""For all watchdogs to write once more."""
STATUS_POLL_S = 0.05
"""Between two looks at the status files of ranks whose stacks are collected."""
STACK_DUMP_TIMEOUT_S = 1.0
"""For a process to dump its stacks on SIGUSR1."""
STACK_DUMP_POLL_S = 0.03
"""Between two looks whether a dump still grows."""
STACK_DUMP_INTERVAL_S = 5.0
"""Between two dumps of the same silent rank."""
PROCESS_START_TOLERANCE_S = 2.0
"""Difference up to which two start times are of one process: the system's clock may have been set in between."""

# -- calls to engines -------------------------------------------------------------------------------------------

FIRST_STEP_TIMEOUT_S = 1800.0
"""A collective's limit until a job's first step has ended, which may compile the model."""
MIN_STEP_TIMEOUT_S = 60.0
"""A collective's shortest limit afterwards, when it follows the median step."""
CALL_TIMEOUT_MARGIN_S = 30.0
"""What the notebook waits beyond a collective's limit: the engines' own error names the cause."""
INDEPENDENT_CALL_TIMEOUT_S = 30.0
"""For what an engine does by itself, without a collective."""
LEAVE_GROUP_TIMEOUT_S = 5.0
"""For engines that live on to forget a cluster that closes."""
FAILURE_GRACE_S = 5.0
"""For the other ranks once one has failed, and again after the interrupt that follows."""
GATHER_TIMEOUT_S = 10.0
"""For the other ranks of a dispatch, once one has answered."""
INTERRUPTED_GATHER_TIMEOUT_S = 1.0
"""The same, once they were interrupted; also the shortest grace after that."""
REFORM_TIMEOUT_S = 30.0
"""For the process group to be formed again, after an interrupt broke it."""
TURN_TIMEOUT_S = 20.0
"""For an abandoned call to begin, while its engines still run an earlier one."""
TURN_STALLED_S = 10.0
"""Time without progress after which that earlier call counts as stuck."""
TURN_STATUS_TIMEOUT_S = 2.0
"""For that engine's watchdog to write a first status."""
REPLY_POLL_S = 0.5
"""Between two looks whether engines that owe a reply are still there."""
INTERRUPT_POLL_S = 0.5
"""Between two waits of a cell: a signal that another thread received is seen there."""
SHORT_INTERRUPT_POLL_S = 0.1
"""The same for waits that mostly end within a second."""
TASK_TIMEOUT_S = 1e7
"""For a user's own loop, which may train for days. Failed and lost ranks are seen at once all the same."""
TASK_INTERRUPT_TIMEOUT_S = 30.0
"""For an interrupted task to end, with the process group formed again."""
OUTPUT_PERIOD_S = 0.25
"""Between two publications of what a call logs and prints."""
OUTPUT_IDLE_TIMEOUT_S = 3600.0
"""For a call's next output; no wait is for ever."""
OUTPUT_JOIN_TIMEOUT_S = 5.0
"""For the last publication, as the call ends."""
OUTPUT_POLL_S = 0.1
"""Between two looks of the notebook at what a call published."""

# -- process groups ---------------------------------------------------------------------------------------------

GROUP_JOIN_POLL_S = 0.002
"""Between two looks whether all ranks have come; a group forms within milliseconds."""
PENDING_WORK_POLL_S = 0.1
"""Between two looks whether a broken group's work has ended."""
CONNECTION_POLL_S = 0.1
"""Between two looks whether the connections of a wait are open."""
SHUTDOWN_NOTICE_TIMEOUT_S = 0.2
"""For gloo to see that a connection has ended."""
SHUTDOWN_NOTICE_POLL_S = 0.0005
"""Between two looks whether it has."""
PEER_INTERRUPT_S = 0.02
"""For the ranks that were interrupted together with this one to shut down their reading sides."""

# -- a run ------------------------------------------------------------------------------------------------------

SLOW_STEP_S = 0.5
"""Step from which dispatches are sent one by one, each after the previous one has returned."""
TARGET_DISPATCH_S = 1.0
"""What a dispatch should last: short enough to pause, long enough that sending it costs little."""
MAX_DISPATCH_S = 2.0
"""Duration after which the ranks agree to end a dispatch early."""
DRIVER_POLL_S = 0.5
"""Between two looks of the driver for a stalled rank; watchdogs write no more often."""
STATE_POLL_S = 1.0
"""Between two looks at an awaited run, whose change may come without a notification."""
PAUSE_GRACE_S = 0.5
"""For a pause to take effect by itself before the engines are interrupted; two steps come on top."""
MAX_PAUSE_GRACE_S = 1.0
"""Longest such grace."""
INTERRUPTED_CELL_TIMEOUT_S = 10.0
"""For the engines to reach a step boundary, after a kernel's interrupt."""
STUCK_COMMAND_TIMEOUT_S = 10.0
"""For a command to take effect where a rank is known to be stuck."""
DEFAULT_SNAPSHOT_INTERVAL_S = 10.0
"""Between two snapshots in memory: what a failure may cost in training time."""
MAX_SNAPSHOT_INTERVAL_S = 30.0
"""Longest interval, however long a snapshot takes; also between two snapshots on disk."""
REPLICA_CHECK_INTERVAL_S = 1.0
"""Shortest interval between two comparisons of the replicas' checksums."""
UNSHARED_REPLICA_CHECK_INTERVAL_S = 60.0
"""The same after a comparison in which no two ranks held the same part."""
LIFECYCLE_JOIN_TIMEOUT_S = 10.0
"""For views to show the end of a run."""
CLOSE_STOP_TIMEOUT_S = 3.0
"""For a run to stop as its cluster closes."""
CLOSE_FETCH_TIMEOUT_S = 5.0
"""For its weights, as the cluster closes."""
CLOSE_CHECKPOINT_TIMEOUT_S = 10.0
"""For the checkpoint that it is writing, as the cluster closes."""
FETCH_INTERRUPT_GRACE_S = 0.1
"""For ranks that did not send their weights in time, after an interrupt."""

# -- checkpoints ------------------------------------------------------------------------------------------------

WRITE_POLL_S = 0.02
"""Between two looks whether all ranks have written their files."""
WRITE_STALL_TIMEOUT_S = 120.0
"""Time without growth of the folder after which a rank has ended, or its disk hangs."""
PREVIOUS_SAVE_TIMEOUT_S = 600.0
"""For an engine's previous save to be written."""
UNFINISHED_MAX_AGE_S = 3600.0
"""Age from which an unfinished folder of another host is removed."""

# -- a cluster's processes --------------------------------------------------------------------------------------

CLUSTER_TIMEOUT_S = 60.0
"""For controller and engines to start and to form their group."""
LEASE_S = 60.0
"""Life of a cluster after its notebook's kernel has ended: time to restart it and to attach."""
JOB_LEASE_S = 1800.0
"""The same while a job is on the engines, with state that would be lost."""
REAPER_POLL_S = 0.5
"""Between two looks of the reaper whether the cluster has an owner."""
OWNERSHIP_RETRY_S = 0.5
"""Between two tries of an attached notebook for a lock that the previous one still holds."""
LOCK_TIMEOUT_S = 5.0
"""For the ownership lock, which the reaper holds for moments only."""
LOCK_POLL_S = 0.01
"""Between two tries for it."""
TERM_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL as a cluster closes."""
KILL_TIMEOUT_S = 5.0
"""For killed processes to end."""
REAPER_EXIT_TIMEOUT_S = 10.0
"""For the reaper to end a cluster and itself."""
PROCESS_POLL_S = 0.02
"""Between two looks whether processes have ended or engines have come."""

# -- displays ---------------------------------------------------------------------------------------------------

LIVE_INTERVAL_S = 0.25
"""Between two updates of a live display: fluent, and under a percent of a core."""
COMPARISON_INTERVAL_S = 0.5
"""Between two updates of a comparison, which reads several runs."""
TIMELINE_INTERVAL_S = 1.0
"""Between two timelines of a live display, whose boxes are most of its bytes."""
PICTURE_INTERVAL_S = 2.0
"""Shortest interval between two pictures of a custom panel."""
LOG_INTERVAL_S = 5.0
"""Between two progress lines of text that goes to a file."""
PROGRESS_DELAY_S = 1.0
"""Duration from which an operation shows its progress."""
PROGRESS_INTERVAL_S = 0.5
"""Between two updates of that progress."""
PROGRESS_JOIN_TIMEOUT_S = 5.0
"""For the thread that shows it to end."""
REPLACE_TIMEOUT_S = 10.0
"""For the live displays of an ended run to become pictures."""

# -- measurements -----------------------------------------------------------------------------------------------

MAX_ALL_REDUCE_S = 0.25
"""All-reduce after which `plan` tries no larger one."""
MATMUL_BUDGET_S = 0.4
"""For the matrix products that `plan` measures."""
UPDATES_BUDGET_S = 0.2
"""For the optimizer's updates that `plan` measures."""
STEPS_BUDGET_S = 1.0
"""For the steps that `plan` measures of one batch size."""
MAX_MEASURED_STEP_S = 4.0
"""Longest step that `plan` measures."""

# -- the test double --------------------------------------------------------------------------------------------

HELD_CALL_TIMEOUT_S = 600.0
"""For a test to release a call that it holds; no wait is for ever."""
PEER_TIMEOUT_S = 5.0
"""For another fake rank to come to a collective."""
FAKE_ENGINE_JOIN_TIMEOUT_S = 5.0
"""For the thread of a fake engine to end."""
