"""From a specification to a finished run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.dataset import Dataset, hold_out_classes, hold_out_images
from ..data.images import Progress as DecodingProgress
from ..data.partition import Indices, fingerprint
from ..data.randomness import generator
from ..data.sources import load_dataset
from ..engines.local import load_state
from ..errors import FedscError, in_words
from ..evaluation import summarise
from ..faults import TooFewClientsError
from ..federation import Federation, Record
from ..files import read_object
from ..method import Method, tested_model
from ..methods import method_from_text, method_to_text
from ..models import build_model, default_model
from ..plugins import file_of, is_path
from ..progress import Silent
from ..spec import NOT_PART_OF_THE_HASH, RunSpec, spec_hash
from ..state import State
from .folder import CLIENTS, FORMAT, RunFolder, environment

# Often enough that little is lost, seldom enough that writing costs nothing worth noticing.
CHECKPOINT_SECONDS = 30.0
MOST_CHECKPOINTING = 0.02  # of a run's time: where writing takes long, it is done less often

ModelFactory = Callable[[tuple[int, int, int], int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    spec: RunSpec
    method: Method
    records: list[Record]  # one per round: the lines of metrics.jsonl
    global_model: nn.Module | None  # None where each client has its own
    server: State
    folder: Path | None

    @property
    def model(self) -> nn.Module:
        """The global model, as it was tested."""
        if self.global_model is None:
            raise FedscError(f"{self.method.name}: each client has its own model, none is global")
        return self.global_model

    @property
    def accuracy(self) -> float:
        """Of the global model on the test set after the last round."""
        return float(self.records[-1]["accuracy"])


def run(
    dataset: str | Dataset = "digits",
    method: str | Method = "fedsc",
    model: str | ModelFactory = "auto",
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    progress: Silent | None = None,
    **options: Any,
) -> Run:
    """Run one federation and return what came of it; with `out`, write the run folder there.

    `dataset`, `method` and `model` are names as on the command line, or your own objects: a
    `Dataset`, a `Method`, and a function `(image_shape, num_classes) -> nn.Module`. `options` are
    the other fields of `RunSpec`: rounds, epochs, partition, clients, seed and so on.
    """
    if not isinstance(dataset, str | Dataset):
        raise FedscError(f"dataset is a {type(dataset).__name__}: give a name or a fedsc.Dataset")
    if not isinstance(method, str | Method):
        raise FedscError(f"method is {method!r}: give a name, or an object such as FedSC(tau=0.1)")
    if isinstance(model, nn.Module) or not (isinstance(model, str) or callable(model)):
        raise FedscError(
            f"model is a {type(model).__name__}: give a name, or a class or function that is "
            "called with (image_shape, num_classes)"
        )
    name = dataset if isinstance(dataset, str) else dataset.name
    made_method = method_from_text(method, name) if isinstance(method, str) else method
    known = [field.name for field in dataclasses.fields(RunSpec)]
    for word in options:
        if word not in known:
            raise FedscError(f"unknown option '{word}' (allowed: {', '.join(known)})")
    spec = RunSpec(
        dataset=name,
        method=method_to_text(made_method, name),
        model=model if isinstance(model, str) else getattr(model, "__name__", "custom"),
        **options,
    )
    data = load(spec, data_dir) if isinstance(dataset, str) else arranged(spec, dataset)
    factory = None if isinstance(model, str) else model
    return execute(spec, data, made_method, factory, None if out is None else Path(out), progress)


def load(
    spec: RunSpec,
    data_dir: str | Path | None = None,
    progress: DecodingProgress | None = None,
) -> Dataset:
    """The data set of a specification, from its files."""
    folder = None if data_dir is None else Path(data_dir)
    return arranged(spec, load_dataset(spec.dataset, folder, progress=progress))


def arranged(spec: RunSpec, data: Dataset) -> Dataset:
    """The data set with another test set, where the specification asks for one."""
    if spec.few_shot is not None:
        data = hold_out_classes(data, spec.few_shot)
    if spec.validation is not None:
        data = hold_out_images(data, spec.validation)
    return data


def execute(
    spec: RunSpec,
    data: Dataset,
    method: Method,
    model_factory: ModelFactory | None = None,
    out: Path | None = None,
    progress: Silent | None = None,
    resume: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Run:
    """Run a specification on loaded data; with `resume`, go on where the folder `out` stopped.

    With `checkpoint_seconds` 0 there is a checkpoint after every round.
    """
    progress = progress or Silent()
    resume = resume and out is not None and (out / "spec.json").exists()
    if resume and out is not None:
        spec = as_it_began(spec, out)
    with number_of_threads(spec.threads), torch.random.fork_rng(devices=[]):
        clients = None if out is None else out / CLIENTS
        federation, model_name = build(spec, data, method, model_factory, progress, clients)
        return carry_out(federation, model_name, out, progress, resume, checkpoint_seconds)


def carry_out(
    federation: Federation,
    model_name: str,
    out: Path | None,
    progress: Silent,
    resume: bool,
    checkpoint_seconds: float,
    more_environment: dict[str, Any] | None = None,
) -> Run:
    """Run a federation to its end and write the run folder.

    `more_environment` is written into environment.json when the run begins.
    """
    spec = federation.spec
    folder = None if out is None else RunFolder(out)
    records: list[Record] = []
    with contextlib.ExitStack() as in_the_folder:
        if folder is not None:
            if resume and (folder.path / "spec.json").exists():
                refuse_other_spec(folder.path, describe(federation, model_name))
                changed = changed_environment(folder.path, federation)
                in_the_folder.enter_context(folder.alone())
                records = folder.restore(federation)
                if changed:
                    federation.say(
                        f"{folder.path} goes on, its last digits may not be those of an uncut run: "
                        + "; ".join(changed)
                    )
            else:
                begin(folder, federation, model_name, more_environment or {})
                in_the_folder.enter_context(folder.alone())
        label = f"{spec.method} seed {spec.seed}"
        progress.start(label, spec.rounds, federation.images_per_round(), federation.round)
        last_checkpoint, wait = time.monotonic(), checkpoint_seconds
        try:
            rounds = federation.rounds()
            if out is not None and records:
                rounds = after_checkpoint(rounds, out)
            for record in rounds:
                records.append(record)
                if folder is not None:
                    folder.append_record(record)
                    began = time.monotonic()
                    if began - last_checkpoint >= wait or federation.round == spec.rounds:
                        folder.save_checkpoint(federation, record["accuracy"])
                        last_checkpoint = time.monotonic()
                        if checkpoint_seconds:
                            cost = last_checkpoint - began
                            wait = max(checkpoint_seconds, cost / MOST_CHECKPOINTING)
                progress.round_done(record)
        except TooFewClientsError:
            if folder is not None and records:
                folder.save_checkpoint(federation, records[-1]["accuracy"])
            raise
        finally:
            progress.finish()
        if folder is not None:
            folder.write_json("summary.json", summarise([r["accuracy"] for r in records]))
    method, server, model = federation.method, federation.server, None
    if method.shares_weights():
        model = federation.model.eval()
        load_state(model, tested_model(method, server))
    return Run(spec, method, records, model, server, out)


def after_checkpoint(rounds: Iterator[Record], path: Path) -> Iterator[Record]:
    """Only the method knows all that a checkpoint must hold: if the first round fails with one that
    seemed whole, the error says so."""
    try:
        first = next(rounds, None)
    except FedscError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise FedscError(f"{path} cannot go on from its checkpoint: {in_words(e)}") from e
    if first is not None:
        yield first
    yield from rounds


def build(
    spec: RunSpec,
    data: Dataset,
    method: Method,
    model_factory: ModelFactory | None = None,
    progress: Silent | None = None,
    client_folder: Path | None = None,
    parts: list[Indices] | None = None,
) -> tuple[Federation, str]:
    """The federation of a specification, and the name of its model.

    `parts` are the clients' images where the specification's partition does not say.

    The first weights depend on the seed only, so all methods start from the same.
    """
    device = pick_device(spec.device)
    torch.manual_seed(int(generator("model", spec.seed).integers(2**63)))
    name = spec.model
    if model_factory is not None:
        try:
            model = model_factory(data.image_shape, data.num_classes)
        except Exception as error:
            raise FedscError(f"the model could not be made: {in_words(error)}") from error
    else:
        if name == "auto":
            name = default_model(data.name, data.image_shape)
        model = build_model(name, data.image_shape, data.num_classes, spec.norm)
    on_images = (progress or Silent()).images
    data = data.to(device)
    return Federation(spec, data, method, model, on_images, client_folder, parts), name


def describe(federation: Federation, model_name: str) -> dict[str, Any]:
    """All that decides the result of a run, with nothing left to a default."""
    spec, data, privacy = federation.spec, federation.data, federation.ledger.privacy
    return {
        **identity(spec, federation.method),
        "model": model_name,
        "augment": data.augment if spec.augment == "auto" else spec.augment,
        "engine": federation.engine_name,
        "threads": torch.get_num_threads(),
        "precision": federation.precision,
        "data_checksum": data.checksum(),
        "partition_hash": fingerprint(federation.parts),
        # As it was solved for, where only a target was given.
        **({} if spec.dp_unit == "none" else {"privacy": dataclasses.asdict(privacy)}),
    }


def identity(spec: RunSpec, method: Method) -> dict[str, Any]:
    """What decides the result of a run, as far as it is known before the data are read."""
    return {
        **dataclasses.asdict(spec),
        "clients": spec.num_clients,
        "label": spec.method,
        "method": {"name": method.name, **dataclasses.asdict(method)},
        "code": {text: file_hash(text) for text in (spec.model, spec.method) if is_path(text)},
    }


def describe_images(data: Dataset) -> dict[str, Any]:
    """What a trained model must know of the images it was trained on."""
    return {"shape": list(data.image_shape), "mean": list(data.mean), "std": list(data.std)}


def file_hash(path_and_name: str) -> str:
    """Of a user's own file: the same path with other code is another run."""
    return hashlib.sha256(file_of(path_and_name).read_bytes()).hexdigest()


def begin(
    folder: RunFolder, federation: Federation, model_name: str, more_environment: dict[str, Any]
) -> None:
    """Make the run folder and write what is known before the first round."""
    spec = describe(federation, model_name)
    partition = {
        "hash": spec["partition_hash"],
        "classes": list(federation.data.classes),
        "images": describe_images(federation.data),
        "class_counts": federation.class_counts.tolist(),
    }
    indices = {str(k): torch.from_numpy(part) for k, part in enumerate(federation.parts)}
    with folder.created():
        folder.write_json("spec.json", {"format": FORMAT, "hash": spec_hash(spec), **spec})
        known = environment(federation.device)
        folder.write_json("environment.json", {**known, **more_environment})
        folder.write_json("partition.json", partition)
        folder.write_tensors("partition.safetensors", indices)


def as_it_began(spec: RunSpec, path: Path) -> RunSpec:
    """The specification with the engine and the threads that a run began with, unless others are
    asked for: the number of threads decides how sums are grouped, and so the last digits. What is
    measured besides stays what it was: the rounds before have a part in it."""
    before = read_object(path / "spec.json")
    calibrated = before.get("calibrated") is True
    if spec.calibrated and not calibrated:
        raise FedscError(
            f"{path} began without --calibrated, and cannot measure it from here on: leave it "
            "out, or start another run"
        )
    return dataclasses.replace(
        spec,
        engine=before.get("engine", "auto") if spec.engine == "auto" else spec.engine,
        threads=before.get("threads") if spec.threads is None else spec.threads,
        calibrated=calibrated,
    )


def changed_environment(path: Path, federation: Federation) -> list[str]:
    """What is no longer as the run began, in words. Another kind of device, where no number would
    be the same, is refused."""
    before, now = read_object(path / "environment.json"), environment(federation.device)
    spec = read_object(path / "spec.json")
    if (before.get("device") == "cpu") != (now["device"] == "cpu"):
        raise FedscError(
            f"{path} began on {before.get('device')} and cannot go on here on {now['device']}: the "
            "rest would not be the same; go on where it began, or start another run"
        )
    packages = before.get("packages")
    torch_before = packages.get("torch") if isinstance(packages, dict) else None
    return [
        f"{what} was {was}, is now {is_now}"
        for what, was, is_now in (
            ("PyTorch", torch_before, now["packages"]["torch"]),
            ("the code", before.get("revision", now["revision"]), now["revision"]),
            ("the GPU", before.get("device"), now["device"]),
            ("the processor", before.get("processor"), now["processor"]),
            ("the engine", spec.get("engine"), federation.engine_name),
            ("the number of threads", spec.get("threads"), torch.get_num_threads()),
        )
        if was != is_now
    ]


def refuse_other_spec(path: Path, spec: dict[str, Any]) -> None:
    """A run goes on only as what it began as."""
    before = read_object(path / "spec.json")
    now = {"format": FORMAT, "hash": spec_hash(spec), **json.loads(json.dumps(spec))}
    changed = [  # the hash last: it says nothing to a person
        f"{name} was {before.get(name)!r}, is now {value!r}"
        for name, value in sorted(now.items(), key=lambda item: item[0] == "hash")
        if before.get(name) != value and name not in NOT_PART_OF_THE_HASH
    ]
    if changed:
        raise FedscError(f"{path} cannot be resumed as another run: {'; '.join(changed)}")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FedscError(f"unknown device '{name}' (allowed: auto, cpu, cuda, cuda:N)") from None
    if device.type not in ("cpu", "cuda"):
        raise FedscError(f"device '{name}' is not supported (allowed: auto, cpu, cuda, cuda:N)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise FedscError(
            f"device '{name}' is not there: this machine has {torch.cuda.device_count()} GPUs "
            "that PyTorch can use; take --device cpu"
        )
    return device


@contextlib.contextmanager
def number_of_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
