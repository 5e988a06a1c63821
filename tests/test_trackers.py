"""Runs in TensorBoard and MLflow, read back with their own readers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsc.cli import main
from fedsc.experiments.runner import execute
from fedsc.experiments.trackers import numbers
from fedsc.federation import Federation
from fedsc.report.runs import read_run

QUICK = ["--rounds", "2", "--epochs", "1", "--train-limit", "60", "--clients", "2"]
QUICK += ["--partition", "iid", "--device", "cpu", "--quiet", "--out", "out"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedsc", "run", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder))
    log.Reload()
    return {
        tag: [(event.step, event.value) for event in log.Scalars(tag)]
        for tag in log.Tags()["scalars"]
    }


def client() -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{Path('out/mlflow.db').resolve()}")


def mlflow_runs() -> list[Any]:
    found = client()
    ids = [experiment.experiment_id for experiment in found.search_experiments()]
    return list(found.search_runs(ids, order_by=["attributes.start_time"]))


def history(run_id: str, name: str) -> list[tuple[int, float]]:
    return sorted((p.step, p.value) for p in client().get_metric_history(run_id, name))


def test_both_trackers_hold_what_the_folder_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["--method", "fedavg", "--method", "fedsc,tau=0.1"]
    tracked = ["--track", "tensorboard", "--track", "mlflow"]
    assert run(monkeypatch, *QUICK, *methods, *tracked) == 0
    by_name = {found.info.run_name: found for found in mlflow_runs()}
    assert by_name.keys() == {"fedavg seed 0", "fedsc,tau=0.1 seed 0"}
    for folder, name in (
        ("fedavg-seed0", "fedavg seed 0"),
        ("fedsc_tau=0.1-seed0", "fedsc,tau=0.1 seed 0"),
    ):
        data = read_run(Path("out") / folder)
        scalars, mlflow = events(data.path), by_name[name]
        assert mlflow.info.status == "FINISHED"
        assert mlflow.data.tags["fedsc.hash"] == data.spec["hash"]
        assert mlflow.data.params["rounds"] == "2"
        assert mlflow.data.params["method.name"] == data.spec["method"]["name"]
        for tag in ("accuracy", "train_loss/ce", "bytes_up"):
            outer, _, inner = tag.partition("/")
            values = [r[outer][inner] if inner else r[outer] for r in data.records]
            assert [step for step, _ in scalars[tag]] == [1, 2]
            assert [value for _, value in scalars[tag]] == pytest.approx(values, rel=1e-6)
            assert history(mlflow.info.run_id, tag) == list(enumerate(values, 1))
    tau = by_name["fedsc,tau=0.1 seed 0"].data.params["method.tau"]
    assert tau == "0.1"


def test_a_resumed_run_is_one_run_without_gaps_or_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after its first round, tracked until then by MLflow only; then resumed with both."""

    def stop_after_one(self: Federation, round: int) -> dict[str, Any]:
        if round == 2:
            raise KeyboardInterrupt
        return original(self, round)

    original = Federation.run_round
    monkeypatch.setattr(Federation, "run_round", stop_after_one)
    *others, _ = execute.__defaults__ or ()
    monkeypatch.setattr(execute, "__defaults__", (*others, 0.0))  # a checkpoint after every round
    assert run(monkeypatch, *QUICK, "--method", "fedavg", "--track", "mlflow") == 130
    (before,) = mlflow_runs()
    assert before.info.status == "KILLED"
    assert len(history(before.info.run_id, "accuracy")) == 1

    monkeypatch.setattr(Federation, "run_round", original)
    tracked = ["--track", "mlflow", "--track", "tensorboard"]
    assert run(monkeypatch, "--resume", "out", "--quiet", *tracked) == 0
    (after,) = mlflow_runs()
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    accuracy = [r["accuracy"] for r in read_run(Path("out/fedavg-seed0")).records]
    assert history(after.info.run_id, "accuracy") == list(enumerate(accuracy, 1))
    assert [step for step, _ in events(Path("out/fedavg-seed0"))["accuracy"]] == [1, 2]


def test_overwrite_takes_the_events_of_the_old_run_away(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = ["--method", "fedavg", "--track", "tensorboard"]
    assert run(monkeypatch, *QUICK, *tracked) == 0
    assert run(monkeypatch, *QUICK, *tracked, "--overwrite") == 0
    assert len(list(Path("out/fedavg-seed0").glob("events.*"))) == 1


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_one_line_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself does for a failed import
    assert run(monkeypatch, *QUICK, "--track", name) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedsc: --track {name} needs the package {name}")
    assert said.endswith("pip install 'fedsc[track]'\n")
    assert not Path("out").exists()


def test_an_unknown_tracker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *QUICK, "--track", "tensorbord") == 2
    assert "did you mean 'tensorboard'?" in capsys.readouterr().err


def test_a_tracker_that_fails_does_not_cost_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{Path('file').resolve()}/mlflow.db")
    assert run(monkeypatch, *QUICK, "--method", "fedavg", "--track", "mlflow") == 0
    assert "no longer tracked in mlflow" in capsys.readouterr().err
    assert len(read_run(Path("out/fedavg-seed0")).records) == 2


def test_nothing_is_imported_unless_asked() -> None:
    code = (
        "import sys; sys.argv = ['fedsc', 'run', *%r]\n"
        "from fedsc.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('mlflow', 'tensorboard', 'sqlalchemy') if name in sys.modules])"
    ) % [*QUICK, "--method", "fedavg"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert not list(Path("out").rglob("events.*"))
    assert not Path("out/mlflow.db").exists()


def test_numbers_of_a_record() -> None:
    record = {"round": 3, "accuracy": 0.5, "ece": None, "per_class": [1.0], "train_loss": {"ce": 2}}
    assert numbers(json.loads(json.dumps(record))) == {"accuracy": 0.5, "train_loss/ce": 2.0}
