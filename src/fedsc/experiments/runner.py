"""From a specification to a finished run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.dataset import Dataset, hold_out_classes
from ..data.images import Progress as DecodingProgress
from ..data.partition import fingerprint
from ..data.randomness import generator
from ..data.sources import load_dataset
from ..engines.local import load_state
from ..errors import FedscError
from ..evaluation import summarise
from ..federation import Federation, Record
from ..method import Method, State
from ..methods import method_from_text, method_to_text
from ..models import build_model, default_model
from ..progress import Silent
from .folder import FORMAT, RunFolder, environment, flatten
from .spec import RunSpec, spec_hash

ModelFactory = Callable[[tuple[int, int, int], int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run."""

    spec: RunSpec
    method: Method
    records: list[Record]  # one per round: the lines of metrics.jsonl
    model: nn.Module  # the global model
    server: State
    folder: Path | None

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
    made_method = method_from_text(method) if isinstance(method, str) else method
    known = [field.name for field in dataclasses.fields(RunSpec)]
    for name in options:
        if name not in known:
            raise FedscError(f"unknown option '{name}' (allowed: {', '.join(known)})")
    spec = RunSpec(
        dataset=dataset if isinstance(dataset, str) else dataset.name,
        method=method_to_text(made_method),
        model=model if isinstance(model, str) else getattr(model, "__name__", "custom"),
        **options,
    )
    data = load(spec, data_dir) if isinstance(dataset, str) else few_shot_form(spec, dataset)
    factory = None if isinstance(model, str) else model
    return execute(spec, data, made_method, factory, None if out is None else Path(out), progress)


def load(
    spec: RunSpec,
    data_dir: str | Path | None = None,
    progress: DecodingProgress | None = None,
) -> Dataset:
    """The data set of a specification, from its files."""
    folder = None if data_dir is None else Path(data_dir)
    return few_shot_form(spec, load_dataset(spec.dataset, folder, progress=progress))


def few_shot_form(spec: RunSpec, data: Dataset) -> Dataset:
    return data if spec.few_shot is None else hold_out_classes(data, spec.few_shot)


def execute(
    spec: RunSpec,
    data: Dataset,
    method: Method,
    model_factory: ModelFactory | None = None,
    out: Path | None = None,
    progress: Silent | None = None,
) -> Run:
    """Run a specification on loaded data."""
    progress = progress or Silent()
    device = pick_device(spec.device)
    with number_of_threads(spec.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator("model", spec.seed).integers(2**63)))
        model_name = spec.model
        if model_factory is not None:
            model = model_factory(data.image_shape, data.num_classes)
        else:
            if model_name == "auto":
                model_name = default_model(data.name, data.image_shape)
            model = build_model(model_name, data.image_shape, data.num_classes, spec.norm)
        federation = Federation(spec, data.to(device), method, model, progress.images)
        folder = None if out is None else RunFolder(out)
        records: list[Record] = []
        if folder is not None:
            try:
                write_beginning(folder, federation, model_name, device)
            except FedscError:
                shutil.rmtree(folder.path, ignore_errors=True)  # nothing half-written stays
                raise
        progress.start(
            f"{spec.method} seed {spec.seed}", spec.rounds, federation.images_per_round()
        )
        try:
            for record in federation.rounds():
                records.append(record)
                if folder is not None:
                    folder.append_record(record)
                progress.round_done(record)
        finally:
            progress.finish()
        if folder is not None:
            memories = {str(k): memory for k, memory in federation.memories.items()}
            state = {"server": federation.server, "clients": memories}
            folder.write_tensors("state.safetensors", flatten(state))
            folder.write_json("summary.json", summarise([r["accuracy"] for r in records]))
    load_state(federation.model, federation.server["model"])
    return Run(spec, method, records, federation.model.eval(), federation.server, out)


def write_beginning(
    folder: RunFolder, federation: Federation, model_name: str, device: torch.device
) -> None:
    """What is known before the first round."""
    spec, data, method = federation.spec, federation.data, federation.method
    resolved = {
        **dataclasses.asdict(spec),
        "clients": spec.num_clients,
        "model": model_name,
        "augment": data.augment if spec.augment == "auto" else spec.augment,
        "method": {"name": method.name, **dataclasses.asdict(method)},
        "data_checksum": data.checksum(),
        "partition_hash": fingerprint(federation.parts),
    }
    folder.write_json("spec.json", {"format": FORMAT, "hash": spec_hash(resolved), **resolved})
    folder.write_json("environment.json", environment(device))
    counts = federation.class_counts.tolist()
    folder.write_json(
        "partition.json",
        {
            "hash": resolved["partition_hash"],
            "classes": list(data.classes),
            "class_counts": counts,
        },
    )
    folder.write_tensors(
        "partition.safetensors",
        {str(k): torch.from_numpy(part) for k, part in enumerate(federation.parts)},
    )


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
