"""Every time constant of dtkit, in seconds. `tests/test_timeouts.py` checks the relations of this table.

Those that only other frameworks need are in `integrations/timeouts.py`.

Use them as ``timeouts.NAME``, so that a test that changes one reaches all uses.

====================== =========================================================================================
what                   in order
====================== =========================================================================================
an engine is stopped   watchdog sample < status too old < watchdog silent < stall reported < heartbeat lost < 10 s
a rank fails           grace for the other ranks < heartbeat lost < gathering of late replies < reforming the group
a call takes too long  stalled predecessor < wait for a turn < collective's limit < the notebook's by over two graces
a pause                grace + interrupt + grace <= 3 s where steps are short
a dispatch             slow step < target < forced end < stall reported
a notebook ends        reaper's poll < lease < lease while a job trains
a cluster closes       SIGTERM's grace + SIGKILL < wait for the reaper
a host is cut off      heartbeat lost <= SSH's checks < controller silent
a checkpoint           poll < no progress < wait for the previous save < age of an abandoned folder
a display              update of the page < picture of a panel
a saved notebook       first picture < first picture of a busy run < further pictures ≤ texts
====================== =========================================================================================
"""

from __future__ import annotations

# -- engine processes: is it alive, is it stuck -----------------------------------------------------------------

HEARTBEAT_PERIOD_S = 0.5
"""Controller's heartbeat. New engines are registered on the second beat, so a longer one delays each start."""
MIN_HEARTBEAT_PERIOD_S = 0.1
"""The same for few engines on this host, whose answers cost the controller little."""
HEARTBEATS_PER_S = 40.0
"""Answers that the controller may get in a second, at 0.1 ms each; more engines have a slower heartbeat."""
HEARTBEAT_CHECK_DELAY_S = 0.5
"""What ipyparallel's engine adds to the period before it counts a missing heartbeat."""
HEARTBEAT_TIMEOUT_S = 8.0
"""Silence after which an engine counts as lost. Only for stopped engines: the end of a process is noticed at once."""
WATCHDOG_PERIOD_S = 0.5
"""Sampling period of an engine's watchdog. A sample costs the engine a fraction of a millisecond."""
SYSTEM_FIRST_SAMPLE_S = 0.25
"""Shortest interval between two samples of a machine at the ends of dispatches."""
SYSTEM_LAST_SAMPLE_S = 0.05
"""Shortest interval before the sample at the end of a run: CPU time is known in steps of 10 ms."""
SYSTEM_SAMPLE_S = 2.0
"""Period of the watchdog's samples of CPU, network, memory and GPU."""
WATCHDOG_MISSED_SAMPLE_S = 1.25
"""Gap between two samples from which the watchdog concludes that its process was stopped."""
MAX_STATUS_AGE_S = 1.25
"""Age above which a status may be an engine's last one; the diagnosis then ignores it."""
WATCHDOG_SILENT_S = 2.5
"""Age above which the engine evidently can't write: C code holds its interpreter, or it is stopped."""
STALL_LIMIT_S = 5.0
"""Shortest delay of a dispatch before its ranks are compared. Statuses from before the delay have expired by then."""
ALL_RANKS_STALL_LIMIT_S = 30.0
"""The same limit where all ranks are alike: a long step or a compilation isn't the fault of one rank."""
CALL_STALL_LIMIT_S = 10.0
"""Time that all ranks of a call of the user's function wait in collectives before this is told."""
STRAGGLER_HOLDOFF_S = 5.0
"""Delay after a recovery until ranks are compared again. By then, the watchdogs count no sample of the stall."""
FRESH_STATUS_TIMEOUT_S = 1.5
"""Limit for all watchdogs to write one more status."""
STATUS_POLL_S = 0.05
"""Polling period for the status files of ranks whose stacks are collected."""
STACK_DUMP_TIMEOUT_S = 1.0
"""Limit for a process to dump its stacks on SIGUSR1."""
STACK_DUMP_POLL_S = 0.03
"""Polling period for a dump that still grows."""
STACK_DUMP_INTERVAL_S = 5.0
"""Shortest interval between two dumps of the same silent rank."""
PROCESS_START_TOLERANCE_S = 2.0
"""Difference up to which two start times belong to one process: the system's clock may have been set in between."""

# -- calls to engines -------------------------------------------------------------------------------------------

FIRST_STEP_TIMEOUT_S = 1800.0
"""A collective's limit until a job's first step has ended, which may compile the model."""
MIN_STEP_TIMEOUT_S = 60.0
"""A collective's shortest limit afterwards, when it follows the median step."""
CALL_TIMEOUT_MARGIN_S = 30.0
"""Margin of the notebook beyond a collective's limit, so that the engines' error arrives first and names the cause."""
INDEPENDENT_CALL_TIMEOUT_S = 30.0
"""Limit for an engine's work without a collective."""
LEAVE_GROUP_TIMEOUT_S = 5.0
"""Limit for engines that outlive the cluster to leave its group."""
FAILURE_GRACE_S = 5.0
"""Grace for the other ranks after one has failed, and again after the interrupt that follows."""
GATHER_TIMEOUT_S = 10.0
"""Limit for the other ranks' results of a dispatch, after the first result."""
INTERRUPTED_GATHER_TIMEOUT_S = 1.0
"""The same limit after an interrupt; also the shortest grace after that."""
REFORM_TIMEOUT_S = 30.0
"""Limit for the process group to be formed again after an interrupt broke it."""
TURN_TIMEOUT_S = 20.0
"""Limit for an abandoned call to begin while its engines still run an earlier one."""
TURN_STALLED_S = 10.0
"""Time without progress after which that earlier call counts as stuck."""
TURN_STATUS_TIMEOUT_S = 2.0
"""Limit for that engine's watchdog to write its first status."""
REPLY_POLL_S = 0.5
"""Polling period for the processes of engines that owe a reply."""
INTERRUPT_POLL_S = 0.5
"""Longest uninterrupted wait of a cell: between two waits it sees signals that another thread received."""
SHORT_INTERRUPT_POLL_S = 0.1
"""The same for waits that usually end within a second."""
TASK_TIMEOUT_S = 1e7
"""Limit for a user's own loop, which may train for days. Failed and lost ranks end the wait at once."""
TASK_INTERRUPT_TIMEOUT_S = 30.0
"""Limit for an interrupted task to end, with the process group formed again."""
SCRIPT_POLL_S = 0.1
"""Longest uninterrupted wait of an engine for a script's process."""
SCRIPT_FAILURE_GRACE_S = 0.5
"""Grace for a script's other ranks after one has failed: those that fail alike may still say so."""
SCRIPT_INTERRUPT_TIMEOUT_S = 2.0
"""Limit for an interrupted script to end by itself, before it is killed."""
SCRIPT_KILL_TIMEOUT_S = 1.0
"""Limit for the system to end a killed script."""
SCRIPT_OUTPUT_TIMEOUT_S = 1.0
"""Limit for the last output of a script that has ended."""
CANCEL_INTERRUPT_TIMEOUT_S = 3.5
"""Limit for a cancelled function to end after an interrupt; longer than a script may take to be killed."""
CANCEL_AGAIN_TIMEOUT_S = 0.5
"""The same limit after the second interrupt."""
CANCEL_TIMEOUT_S = 9.5
"""Limit for `cancel()` as a whole, which promises ten seconds; replacing engines may go on afterwards."""
CANCEL_KILL_TIMEOUT_S = 1.0
"""Limit for the notebook to notice that a cancelled function's engine has ended."""
STEP_CALLBACKS_TIMEOUT_S = 60.0
"""Limit for callbacks to look at the last steps, after the run has ended."""
OUTPUT_PERIOD_S = 0.25
"""Period of publishing a call's output."""
OUTPUT_IDLE_TIMEOUT_S = 3600.0
"""Limit for a call's next output."""
OUTPUT_JOIN_TIMEOUT_S = 5.0
"""Limit for the last publication when the call ends."""
OUTPUT_POLL_S = 0.1
"""Polling period of the notebook for a call's published output."""

# -- process groups ---------------------------------------------------------------------------------------------

GROUP_JOIN_POLL_S = 0.002
"""Polling period until all ranks have joined; a group forms within milliseconds."""
PENDING_WORK_POLL_S = 0.1
"""Polling period until a broken group's work has ended."""
CONNECTION_POLL_S = 0.1
"""Period of checking that the connections of a wait are open."""
SHUTDOWN_NOTICE_TIMEOUT_S = 0.2
"""Limit for gloo to notice that a connection has ended."""
SHUTDOWN_NOTICE_POLL_S = 0.0005
"""Polling period until gloo has noticed."""
PEER_INTERRUPT_S = 0.02
"""Delay for the ranks that were interrupted with this one to shut down their reading sides."""

# -- a run ------------------------------------------------------------------------------------------------------

SLOW_STEP_S = 0.5
"""Step duration above which each dispatch is sent after the previous one has returned."""
TARGET_DISPATCH_S = 0.9
"""Target duration of a dispatch: views show each one within a second, and sending it costs little."""
MAX_DISPATCH_S = 2.0
"""Duration after which the ranks agree to end a dispatch early."""
DRIVER_POLL_S = 0.5
"""Period at which the driver looks for a stalled rank; watchdogs write at the same rate."""
STATE_POLL_S = 1.0
"""Polling period of an awaited run, whose state may change without a notification."""
PAUSE_GRACE_S = 0.5
"""Grace for a pause to take effect before the engines are interrupted; two steps are added to it."""
MAX_PAUSE_GRACE_S = 1.0
"""Longest such grace."""
INTERRUPTED_CELL_TIMEOUT_S = 10.0
"""Limit for the engines to reach a step boundary after the kernel was interrupted."""
STUCK_COMMAND_TIMEOUT_S = 10.0
"""Limit for a command to take effect while a rank is known to be stuck."""
DEFAULT_SNAPSHOT_INTERVAL_S = 10.0
"""Interval between two snapshots in memory: the training time that a failure may cost."""
MAX_SNAPSHOT_INTERVAL_S = 30.0
"""Longest interval, however long a snapshot takes; also between two snapshots on disk."""
REPLICA_CHECK_INTERVAL_S = 1.0
"""Shortest interval between two comparisons of the replicas' checksums."""
UNSHARED_REPLICA_CHECK_INTERVAL_S = 60.0
"""The same after a comparison in which no two ranks held the same part."""
LIFECYCLE_JOIN_TIMEOUT_S = 10.0
"""Limit for views to show the end of a run."""
CLOSE_STOP_TIMEOUT_S = 3.0
"""Limit for a run to stop when its cluster closes."""
CLOSE_FETCH_TIMEOUT_S = 5.0
"""Limit for fetching its weights when the cluster closes."""
CLOSE_CHECKPOINT_TIMEOUT_S = 10.0
"""Limit for finishing its checkpoint when the cluster closes."""
FETCH_INTERRUPT_GRACE_S = 0.1
"""Grace, after an interrupt, for ranks that did not send their weights in time."""
CLOSE_CALLBACKS_TIMEOUT_S = 10.0
"""Limit for callbacks to finish their background work when the cluster closes."""

# -- checkpoints ------------------------------------------------------------------------------------------------

WRITE_POLL_S = 0.02
"""Polling period until all ranks have written their files."""
REMOTE_WRITE_POLL_S = 0.1
"""The same where an agent is asked for them."""
WRITE_STALL_TIMEOUT_S = 120.0
"""Time without growth of the folder after which a rank has ended, or its disk hangs."""
PREVIOUS_SAVE_TIMEOUT_S = 600.0
"""Limit for an engine's previous save to be written."""
UNFINISHED_MAX_AGE_S = 3600.0
"""Age from which an unfinished folder of another host is removed."""

# -- a cluster's processes --------------------------------------------------------------------------------------

CLUSTER_TIMEOUT_S = 60.0
"""Limit for the controller and the engines to start and to form their group."""
LEASE_S = 60.0
"""Lifetime of a cluster after its notebook's kernel has ended: time to restart the kernel and to attach."""
JOB_LEASE_S = 1800.0
"""The same while the engines hold a job, whose state would be lost."""
REAPER_POLL_S = 0.5
"""Period at which the reaper checks that the cluster has an owner."""
OWNERSHIP_RETRY_S = 0.5
"""Retry period of an attached notebook for a lock that the previous notebook still holds."""
LOCK_TIMEOUT_S = 5.0
"""Limit for taking the ownership lock, which the reaper holds only briefly."""
LOCK_POLL_S = 0.01
"""Retry period for that lock."""
TERM_GRACE_S = 1.0
"""Delay between SIGTERM and SIGKILL when a cluster closes."""
KILL_TIMEOUT_S = 5.0
"""Limit for killed processes to end, and for their parents to reap them."""
REAPER_EXIT_TIMEOUT_S = 10.0
"""Limit for the reaper to end a cluster and itself."""
FORK_REQUEST_TIMEOUT_S = 5.0
"""Limit for a loaded fork server to read a request and to say who it is."""
PROCESS_POLL_S = 0.02
"""Polling period until processes have ended, engines have registered, or ranks have arrived."""
ENDING_PROCESS_TIMEOUT_S = 0.5
"""Time for the process of a lost engine to end, before it is said to run; and for its parent to note that."""

# -- several hosts ----------------------------------------------------------------------------------------------

CONTROLLER_GONE_S = 50.0
"""Time without a heartbeat of the controller after which engines of its own host end, unless the reaper ended them."""
CONTROLLER_SILENT_S = 10.0
"""Time without a heartbeat of the controller after which agents and engines end. The controller drops them sooner."""
REGISTRATION_TIMEOUT_S = 60.0
"""Limit for an engine to register with a busy controller."""
AGENT_CALL_TIMEOUT_S = 10.0
"""Limit for an agent's answer, without data."""
AGENT_DATA_TIMEOUT_S = 600.0
"""Limit for sending data to a host."""
AGENT_STOP_TIMEOUT_S = 8.0
"""Limit for the agents to end their engines as a cluster closes."""
AGENT_EXIT_DELAY_S = 0.2
"""Delay before a stopped agent ends, so that it can send its reply."""
NEW_AGENT_TIMEOUT_S = 30.0
"""Limit for an agent that replaces a lost one."""
MENTIONED_CLOCK_LEAD_S = 0.1
"""Difference of two hosts' times of day from which a cluster mentions it."""
MENTIONED_CLOCK_ERROR_S = 0.005
"""Uncertainty of timelines from which a cluster mentions it."""
MIRROR_PERIOD_S = 0.25
"""Period at which the notebook compares its folder with those of the hosts."""
LINK_CHECK_S = 2.0
"""Period of comparing the speeds of links between hosts. Two checks in a row name a slow one."""
JOB_POLL_S = 0.5
"""Period of reading the state of the jobs that run agents, and of asking agents whether torch is loaded."""
REACH_TIMEOUT_S = 5.0
"""Limit for a connection from one host to another."""
STORE_HANDSHAKE_TIMEOUT_S = 10.0
"""Limit for a connection to the store to prove that it knows the key."""
STORE_ANSWER_TIMEOUT_S = 10.0
"""Limit for an answer of the store, which never waits."""
STORE_POLL_S = 0.005
"""Period at which a rank retries to read a value that is missing in the store."""
SSH_CONNECT_TIMEOUT_S = 10.0
"""Limit for SSH to connect; SSH takes whole seconds."""
SSH_ALIVE_INTERVAL_S = 2.0
"""Period at which SSH checks its connection, in whole seconds."""

# -- Slurm --------------------------------------------------------------------------------------------------------

SLURM_COMMAND_TIMEOUT_S = 20.0
"""Limit for one of a scheduler's commands to answer."""
SLURM_POLL_S = 2.0
"""Period of reading a job's state. Slurm's controller serves all users of the site."""
TIME_LIMIT_POLL_S = 30.0
"""Period of asking how long jobs have left."""
MIN_TIME_LIMIT_POLL_S = 2.0
"""The same shortly before something is due."""
TIME_LIMIT_CHECKPOINT_S = 300.0
"""Time before the end of a job at which a run writes a checkpoint."""
SLURM_CANCEL_POLL_S = 0.25
"""The same while Slurm ends it, which takes a second or two."""
SLURM_CANCEL_TIMEOUT_S = 45.0
"""Limit for a cancelled job to end: Slurm kills its processes after a KillWait of 30 s."""

# -- displays ---------------------------------------------------------------------------------------------------

LIVE_INTERVAL_S = 0.25
"""Period of updating a live display: smooth, at less than one percent of a core."""
LIVE_UNWATCHED_INTERVAL_S = 5.0
"""Period of the charts on a busy machine while nobody touches the page (attention.py). The text follows sooner."""
TIMER_TOLERANCE_S = 0.001
"""How much before its time a timer may end."""
SIGHT_REPORT_LIFE_S = 75.0
"""How long a page's report counts of which panels are in sight. It reports every 30 s, in the background every 60."""
LIVE_HEARTBEAT_S = 2.0
"""Period of the signs of life to a live display. The page misses them after five seconds (store.js)."""
ELAPSED_INTERVAL_S = 1.0
"""Interval between two writes of a run's elapsed time, which a notebook that takes it over reads."""
COMPARISON_INTERVAL_S = 0.5
"""Period of updating a comparison, which reads several runs."""
TIMELINE_INTERVAL_S = 1.0
"""Interval between two timelines of a live display, whose boxes are most of its bytes."""
VERDICT_INTERVAL_S = 2.0
"""Interval between two verdicts of a live display, so that its line can be read."""
VERDICT_HOLD_S = 6.0
"""How long another verdict must be found before it replaces the shown one."""
VERDICT_WAITING_RUN_S = 5.0
"""Time of steps from which a verdict names waits for the notebook: in a shorter run, they save nobody any time."""
EFFECT_SHOWN_S = 15.0
"""How long a live display confirms a command; later the text would read as the present state."""
PICTURE_INTERVAL_S = 2.0
"""Shortest interval between two pictures of a custom panel."""
LOG_INTERVAL_S = 5.0
"""Interval between two progress lines if the output goes to a file."""
PRINTED_SAVING_S = 10.0
"""Time that a verdict's remedy must save in a run for progress to print it."""
PROGRESS_DELAY_S = 1.0
"""Duration after which an operation shows its progress."""
PROGRESS_INTERVAL_S = 0.5
"""Period of updating that progress."""
PROGRESS_JOIN_TIMEOUT_S = 5.0
"""Limit for the thread that shows the progress to end."""
STEP_TIME_MEMORY_S = 10.0
"""How long a step time counts in the time that is left: a clock that jumps with each dispatch can't be read."""
KEPT_PICTURE_FIRST_S = 5.0
"""Delay of the first picture that a saved notebook shows of a run: many runs end or pause sooner."""
KEPT_PICTURE_BUSY_FIRST_S = 20.0
"""The same while the run has no core to spare: drawing takes a second or two of one."""
KEPT_PICTURE_INTERVAL_S = 30.0
"""Shortest interval between two such pictures during a run."""
KEPT_TEXT_INTERVAL_S = 60.0
"""Shortest interval between two texts above such a picture, or in its place. Each takes a page 40 to 160 ms."""
SHOWN_VALIDATION_S = 2.0
"""Length from which views say that a validation is under way."""
REPLACE_TIMEOUT_S = 30.0
"""Limit for the live displays of an ended run to become pictures."""
GIT_TIMEOUT_S = 3.0
"""Limit for git to name the commit of a report or of a tracked run."""
LESSON_TIMEOUT_S = 60.0
"""Default limit for a lesson to wait for a condition of a run."""

# -- measurements -----------------------------------------------------------------------------------------------

MAX_ALL_REDUCE_S = 0.25
"""Duration of an all-reduce after which `plan` tries no larger one."""
MATMUL_BUDGET_S = 0.2
"""Time that `plan` spends on measuring matrix products."""
UPDATES_BUDGET_S = 0.1
"""Time that `plan` spends on measuring the optimizer's updates."""
STEPS_BUDGET_S = 0.4
"""Time that `plan` spends on measuring the steps of one batch size."""
STRATEGY_BUDGET_S = 0.3
"""Time that `plan` spends on measuring the steps of one strategy."""
MAX_TRIED_STEP_S = 0.1
"""Longest step, by its estimate, that `plan` measures under each strategy."""
MAX_MEASURED_STEP_S = 4.0
"""Longest step that `plan` measures."""

# -- the test double --------------------------------------------------------------------------------------------

HELD_CALL_TIMEOUT_S = 600.0
"""Limit for a test to release a call that it holds."""
FAKE_ENGINE_TIMEOUT_S = 5.0
"""Limit for other fake ranks to join a collective, and for a fake engine's thread to end."""
