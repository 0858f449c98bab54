"""Experiment trackers on real trainings, read back with the trackers' own packages."""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit.integrations.trackers import MLflow, TensorBoard, Tracker, Trackio, Wandb
from dtkit.types import State
from tests.support import small
from tests.support.marks import slow
from tests.support.reattach import NOTEBOOK, notebook
from tests.support.waiting import wait_until
from tests.support.wandb_file import read_records

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.integrations.trackers import TrackedRun

pytestmark = pytest.mark.cluster


def log_rows(output: Any, target: Any) -> Any:
    from torch.nn import functional as F

    dtkit.log(rows=len(output))
    return F.cross_entropy(output, target)


def train(cluster: dtkit.Cluster, tracker: Any, **options: Any) -> dtkit.Run:
    """Train for 20 steps with an evaluation after each fourth; wait for the end."""
    defaults = {"validation": small.data(), "metrics": {"accuracy": small.accuracy}, "name": "tracked", "tags": ["one"]}
    run = small.train(cluster, loss=log_rows, callbacks=[tracker], **(defaults | options))
    run.wait(60)
    assert [event.text for event in run.history.events if "is off" in event.text] == []
    return run


def check_series(run: dtkit.Run, series: dict[str, dict[int, float]], rel: float = 1e-6) -> None:
    """Check that a tracker has every number of a run's history. `rel` is the precision of its files."""
    history = run.history
    steps, losses = history.loss()
    assert list(series["train/loss"]) == steps.tolist()
    assert list(series["train/loss"].values()) == pytest.approx(losses.tolist(), rel=rel)
    assert list(series["train/samples_per_s"].values()) == pytest.approx(history.throughput()[1].tolist(), rel=rel)
    assert list(series["train/learning_rate"].values()) == pytest.approx([0.1] * len(steps), rel=rel)
    for rank in (0, 1):
        assert list(series[f"node_{rank}/loss"].values()) == pytest.approx(history.loss(rank)[1].tolist(), rel=rel)
        speeds = history.throughput(rank)[1].tolist()
        assert list(series[f"node_{rank}/samples_per_s"].values()) == pytest.approx(speeds, rel=rel)
    evaluations = {e.step: e.values["accuracy"] for e in history.evaluations}
    assert series["validation/accuracy"] == pytest.approx(evaluations, rel=rel)
    assert series["logged/rows"] == dict.fromkeys(steps.tolist(), 8.0)


# -- TensorBoard -----------------------------------------------------------------------------------------------


def read_tensorboard(folder: Path) -> Any:
    """Return TensorBoard's own view of the one run in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run_folder,) = folder.iterdir()
    accumulator = EventAccumulator(str(run_folder), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def read_scalars(accumulator: Any) -> dict[str, dict[int, float]]:
    tags = accumulator.Tags()["scalars"]
    return {tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in tags}


def test_tensorboard_has_all_numbers_parameters_and_the_report(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("tensorboard")
    run = train(cluster2, TensorBoard(tmp_path, every=1, params={"width": 8}))
    accumulator = read_tensorboard(tmp_path)
    check_series(run, read_scalars(accumulator))
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    parameters = data.session_start_info.hparams
    assert parameters["batch_size"].number_value == 16
    assert parameters["strategy"].string_value == "DataParallel()"
    assert parameters["width"].number_value == 8
    assert parameters["learning_rate"].number_value == 0.1
    (report,) = tmp_path.glob("tracked-*/report.html")
    assert "20 of 20" in report.read_text()


@pytest.mark.slow
def test_tensorboard_by_default_has_all_of_a_short_run(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("tensorboard")
    run = train(cluster2, TensorBoard(tmp_path))
    check_series(run, read_scalars(read_tensorboard(tmp_path)))


def test_a_resumed_run_goes_on_in_the_same_folder(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("tensorboard")
    folder, checkpoints = tmp_path / "runs", tmp_path / "checkpoints"
    train(cluster2, TensorBoard(folder, every=1), checkpoint_dir=checkpoints, checkpoint_every=8, keep_last=9)
    checkpoint = next(path for path in checkpoints.iterdir() if dtkit.Checkpoint(path).step == 8)
    run = train(cluster2, TensorBoard(folder, every=1), resume_from=checkpoint, steps=24)
    series = read_scalars(read_tensorboard(folder))
    assert list(series["train/loss"]) == list(range(24))
    check_series(run, series)


@pytest.mark.slow
def test_an_extended_run_goes_on_in_the_same_folder(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("tensorboard")
    run = train(cluster2, TensorBoard(tmp_path, every=1))
    run.extend(steps=5)
    run.wait(60)
    check_series(run, read_scalars(read_tensorboard(tmp_path)))


@pytest.mark.slow
def test_a_second_run_of_a_tracker_gets_a_folder_of_its_own(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path, report=False)
    train(cluster2, tracker)
    train(cluster2, tracker)
    assert len(list(tmp_path.iterdir())) == 2


def fail_at_8(model: Any, batch: Any) -> Any:
    from torch.nn import functional as F

    fail_at_8.calls = getattr(fail_at_8, "calls", 0) + 1  # type: ignore[attr-defined]
    if fail_at_8.calls == 8:  # type: ignore[attr-defined]
        raise ValueError("the eighth step")
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.slow
def test_the_report_of_a_failed_and_of_a_stopped_run_is_stored(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path / "failed")
    run = small.train(cluster2, loss=None, training_step=fail_at_8, callbacks=[tracker])
    with pytest.raises(dtkit.errors.EngineError, match="the eighth step"):
        run.wait(60)
    (report,) = tmp_path.glob("failed/*/report.html")
    assert "the eighth step" in report.read_text()
    tracker = TensorBoard(tmp_path / "stopped")
    run = small.train(cluster2, callbacks=[tracker], steps=small.LONG)
    run.stop()
    run.wait(60)
    assert list(tmp_path.glob("stopped/*/report.html"))


# -- others ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_has_all_numbers_parameters_and_the_report(
    cluster2: dtkit.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # artifacts go below the current folder
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run = train(cluster2, MLflow("mine", tracking_uri=uri, every=1, params={"width": 8}))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    (stored,) = client.search_runs([experiment.experiment_id])
    run_id = stored.info.run_id
    series = {
        name: {metric.step: metric.value for metric in client.get_metric_history(run_id, name)}
        for name in stored.data.metrics
    }
    check_series(run, {name: dict(sorted(values.items())) for name, values in series.items()}, rel=1e-12)
    assert (stored.data.params["batch_size"], stored.data.params["width"]) == ("16", "8")
    assert (stored.info.status, stored.info.run_name, stored.data.tags["one"]) == ("FINISHED", "tracked", "true")
    assert [file.path for file in client.list_artifacts(run_id)] == ["report.html"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_continues_a_resumed_run(cluster2: dtkit.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri, checkpoints = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "checkpoints"
    train(cluster2, MLflow(tracking_uri=uri, every=1), checkpoint_dir=checkpoints, checkpoint_every=20)
    train(cluster2, MLflow(tracking_uri=uri, every=1), resume_from=checkpoints, steps=24)
    client = MlflowClient(uri)
    (stored,) = client.search_runs([client.get_experiment_by_name("dtkit").experiment_id])
    history = client.get_metric_history(stored.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(24))
    assert (stored.data.params["steps"], stored.data.tags["resumed.steps"]) == ("20", "24")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_all_numbers_config_and_the_report_offline(cluster2: dtkit.Cluster, tmp_path: Path):
    pytest.importorskip("wandb")
    run = train(cluster2, Wandb("mine", folder=tmp_path, every=1, params={"width": 8}))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    rows, config, final = read_wandb(file)
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            series.setdefault(name, {})[int(row["step"])] = value
    check_series(run, series, rel=1e-12)
    assert (config["batch_size"], config["width"]) == (16, 8)
    assert final.project == "mine"
    assert final.run_id.startswith("tracked-")
    assert (folder / "files" / "report.html").exists()


def read_wandb(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any], Any]:
    """Return the history's rows, the config and the run's record of an offline file."""
    rows, config, started = [], {}, None
    for record in read_records(file):
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
        for update in (record.config.update, record.run.config.update):
            config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in update}
        if record.HasField("run"):
            started = record.run
    return rows, config, started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_all_numbers_the_config_and_the_report(
    cluster2: dtkit.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when trackio is imported
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = train(cluster2, Trackio("mine", every=1, params={"width": 8}))
    (name,) = [name for name in SQLiteStorage.get_runs("mine") if name.startswith("tracked-")]
    series: dict[str, dict[int, float]] = {}
    for row in SQLiteStorage.get_logs("mine", name):
        for key, value in row.items():
            series.setdefault(key, {})[int(row["step"])] = value
    check_series(run, series, rel=1e-12)


# -- trackers that fail ----------------------------------------------------------------------------------------


class Broken(Tracker):
    """Raises in one of the methods of its writer."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.calls = method, 0

    def open(self, run: TrackedRun) -> Any:
        if self.method == "open":
            raise OSError("no disk")
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("write_") and name != "close":
            raise AttributeError(name)
        return self._call if name == vars(self).get("method") else lambda *_: None

    def _call(self, *_: Any) -> None:
        self.calls += 1
        raise OSError("no disk")


@pytest.mark.parametrize(
    "method", [slow("open"), slow("write_parameters"), "write_points", slow("write_report"), slow("close")]
)
def test_a_tracker_that_raises_warns_once_and_ends_no_training(
    cluster2: dtkit.Cluster, method: str, caplog: pytest.LogCaptureFixture
):
    tracker = Broken(method)
    with caplog.at_level(logging.WARNING, "dtkit"):
        run = small.train(cluster2, callbacks=[tracker])
        run.wait(60)
        run.extend(steps=4)
        run.wait(60)
    assert run.status.state is State.COMPLETED
    assert len([record for record in caplog.records if "is off" in record.message]) == 1
    assert len([event for event in run.history.events if "is off" in event.text]) == 1
    assert tracker.calls == (method != "open")
    assert "dtkit-tracker" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_the_last_record_is_written_before_the_cluster_is_closed(tmp_path: Path):
    pytest.importorskip("tensorboard")
    with dtkit.Cluster(1, threads=1) as cluster:
        run = small.train(cluster, callbacks=[TensorBoard(tmp_path, every=1)], start=False)
        run.step(7)
    assert run.status.state is State.STOPPED
    series = read_scalars(read_tensorboard(tmp_path))
    assert np.array_equal(list(series["train/loss"]), run.history.loss()[0])
    assert list(tmp_path.glob("*/report.html"))


@pytest.mark.slow
def test_a_notebook_that_takes_over_goes_on_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    folder = tmp_path / "runs"
    tracker = f"TensorBoard({str(folder)!r}, every=1)"
    code = NOTEBOOK.replace("import dtkit\n", "import dtkit\nfrom dtkit.integrations.trackers import TensorBoard\n")
    code = code.replace('shuffle="global", ', f'shuffle="global", callbacks=[{tracker}], ')
    with notebook(code) as process:
        positions = "*/runs/*/tracker-*.json"
        wait_until(lambda: any(json.loads(p.read_text())["totals"] for p in (tmp_path / "runtime").glob(positions)))
        process.kill()
        process.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            run.resume()
            run.wait(120)
    series = read_scalars(read_tensorboard(folder))
    steps, losses = run.history.loss()
    assert list(series["train/loss"]) == steps.tolist()
    assert list(series["train/loss"].values()) == pytest.approx(losses.tolist(), rel=1e-6)
