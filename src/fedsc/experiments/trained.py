"""The trained model of a run folder, for use: as files for other programs, or on new images."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.folder import SUFFIXES
from ..data.images import decode, inspect
from ..data.npz import read_npz_images
from ..data.plan import cohort_size
from ..data.transform import normalise
from ..engines.local import load_state
from ..errors import FedscError, in_words
from ..evaluation import EVALUATION_BATCH, run_model
from ..files import explain_write_errors, read_object, write_atomically
from ..method import Method, Task, tested_model
from ..methods import method_class
from ..models import MODELS, build_model, check_model
from ..models.outputs import Outputs
from ..plugins import is_path, refuse_code
from ..prototypes import unit
from ..report.checks import (
    IMAGES,
    OPTIONAL_IN_A_SPEC,
    SPEC,
    check_file,
    wrong_in,
)
from ..spec import RunSpec
from ..state import State, check_like, num_bytes
from .checkpoint import unseal
from .folder import FORMAT, NEWEST
from .runner import describe_images, load

By = Literal["classifier", "prototype"]
PROTOTYPE_TEMPERATURE = 0.1  # cosines lie within [-1, 1]: undivided, all classes would look alike


class NoGlobalModelError(FedscError):
    """Of a method whose clients each have their own."""


class WithNormalisation(nn.Module):
    """Images (N, channels, height, width) uint8 -> logits (N, C)."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def outputs(self, images: Tensor) -> Outputs:
        result: Outputs = self.network(normalise(images, self.mean, self.std))
        return result

    def forward(self, images: Tensor) -> Tensor:
        return self.outputs(images).logits


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's global model, and what is needed to use it."""

    model: WithNormalisation  # in evaluation mode, on the CPU
    method: Method
    server: State
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    facts: dict[str, Any]  # where it comes from

    def probabilities(self, images: Tensor, by: By) -> Tensor:
        """Of each class (N, C), for images (N, channels, height, width) uint8."""
        batches = images.split(EVALUATION_BATCH["cpu"])
        outputs = run_model(self.model.outputs, self.model, batches)
        if by == "classifier":
            (scores,) = self.method.predictions([outputs], self.server)
            return F.softmax(scores, 1)
        found = self.method.prototypes(self.server)
        if found is None or not bool(found[1].any()):
            raise FedscError(f"{self.method.name} has no prototypes: take --by classifier")
        prototypes, exists = found
        cosine = unit(outputs.features) @ unit(prototypes).T
        cosine = cosine.masked_fill(~exists, -torch.inf)
        return F.softmax(cosine / PROTOTYPE_TEMPERATURE, 1)


def load_trained(run: Path, data_dir: Path | None = None) -> Trained:
    """The model of a run folder as its last checkpoint has it."""
    for name in ("spec.json", "partition.json", NEWEST):
        if not (run / name).exists():
            raise FedscError(f"{run} is not a run folder with a trained model: it has no {name}")
    spec, partition = (read_object(run / name) for name in ("spec.json", "partition.json"))
    facts, state = unseal(run / NEWEST)
    if spec.get("format") != FORMAT:
        raise FedscError(f"{run} has a format this version cannot read (it reads {FORMAT})")
    wrong = wrong_in(spec, SPEC, OPTIONAL_IN_A_SPEC)
    if wrong:
        raise FedscError(f"{run / 'spec.json'} is damaged: {wrong}")
    refuse_code(run, (spec["label"], spec["model"]))
    if spec["model"] not in MODELS and not is_path(spec["model"]):
        raise FedscError(
            f"{run} was trained with a model from Python code, '{spec['model']}', of which the "
            "folder has only the weights: use the .model that fedsc.run gave you"
        )
    try:
        check_file("partition", partition)
        images = partition.get("images") or images_of(spec, data_dir)
        wrong = wrong_in(images, IMAGES)
        if wrong or {len(images["mean"]), len(images["std"])} != {images["shape"][0]}:
            raise ValueError(wrong or "its normalisation has other channels than its images")
        return assemble(spec, tuple(partition["classes"]), images, state, facts["round"])
    except NoGlobalModelError as error:
        raise FedscError(f"{run} {error}") from None
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise FedscError(f"{run} is damaged: {in_words(error)}") from None


def assemble(
    spec: dict[str, Any], classes: tuple[str, ...], images: dict[str, Any], state: State, round: int
) -> Trained:
    """The network of a run with the weights of its checkpoint."""
    settings = {name: value for name, value in spec["method"].items() if name != "name"}
    method = method_class(spec["label"].split(",")[0].strip())(**settings)
    if not method.shares_weights():
        raise NoGlobalModelError("has a model per client and no global one: nothing to take")
    shape = images["shape"][0], images["shape"][1], images["shape"][2]
    arguments = spec["model"], shape, len(classes), spec.get("norm", "auto")
    if not is_path(spec["model"]):
        with torch.device("meta"):  # takes no memory, whatever size the folder claims
            claimed = num_bytes(build_model(*arguments).state_dict())
        if claimed > 2 * num_bytes(state["model"]):
            raise ValueError("its weights are not those of such images and classes")
    network = build_model(*arguments)
    clients = spec["clients"]
    cohort = cohort_size(clients, spec["participation"])
    dim = check_model(network, shape, len(classes))
    task = Task(clients, cohort, len(classes), dim, spec["rounds"], spec["seed"])
    network = method.adapt_model(network, task)
    task = dataclasses.replace(task, feature_dim=check_model(network, shape, len(classes)))
    check_like(state, {**method.init_server(task), "model": network.state_dict()})
    load_state(network, tested_model(method, state))
    facts = {
        "method": spec["label"],
        "dataset": spec["dataset"],
        "model": spec["model"],
        "spec_hash": spec["hash"],
        "finished_rounds": round,
    }
    model = WithNormalisation(network, images["mean"], images["std"])
    return Trained(model.eval().requires_grad_(False), method, state, classes, shape, facts)


def images_of(spec: dict[str, Any], data_dir: Path | None) -> dict[str, Any]:
    """Of a run folder that does not say: from its data set."""
    names = {field.name for field in dataclasses.fields(RunSpec)} - {"method", "engine", "model"}
    return describe_images(load(RunSpec(**{k: spec[k] for k in names if k in spec}), data_dir))


# Files for other programs -------------------------------------------------------------------------


def export(trained: Trained, out: Path) -> Iterator[Path]:
    """Write model.pt2 (torch.export), model.onnx if it can be made, and model.json; yields each."""
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    example = torch.zeros(2, *trained.image_shape, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        number = torch.export.Dim("number", min=1)
        try:
            program = torch.export.export(
                trained.model, (example,), dynamic_shapes={"images": {0: number}}
            )
        except Exception as error:
            raise FedscError(f"torch.export cannot take this model: {error}") from error
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        write_atomically(out / "model.pt2", buffer.getvalue())
        yield out / "model.pt2"
        if has_onnx():
            write_atomically(out / "model.onnx", onnx_bytes(program))
            yield out / "model.onnx"
    facts = {
        "input": {"name": "images", "type": "uint8", "shape": ["number", *trained.image_shape]},
        "output": {"name": "logits", "type": "float32", "shape": ["number", len(trained.classes)]},
        "classes": list(trained.classes),
        **trained.facts,
    }
    write_atomically(out / "model.json", (json.dumps(facts, indent=2) + "\n").encode())
    yield out / "model.json"


def has_onnx() -> bool:
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        return False
    return True


def onnx_bytes(program: torch.export.ExportedProgram) -> bytes:
    # It warns of operators of packages that are not here and not needed.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    made = torch.onnx.export(
        program, input_names=["images"], output_names=["logits"], dynamo=True, verbose=False
    )
    assert made is not None
    return bytes(made.model_proto.SerializeToString())


# New images ---------------------------------------------------------------------------------------


def read_images(paths: list[Path], shape: tuple[int, int, int]) -> tuple[list[str], Tensor]:
    """Names and images (N, channels, height, width) of files, folders of images and .npz files."""
    names: list[str] = []
    images: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for path in paths:
        if path.suffix.lower() == ".npz":
            array = read_npz_images(path)
            names += [f"{path}[{i}]" for i in range(len(array))]
        else:
            files = list_images(path)
            for file in files:
                (width, height), _ = inspect(file)
                if (height, width) != shape[1:]:
                    raise FedscError(
                        f"{file} is {width}x{height} pixels, the model takes "
                        f"{shape[2]}x{shape[1]}: resize it"
                    )
            array = decode(files, (shape[2], shape[1]), shape[0])
            names += [str(file) for file in files]
        if array.shape[1:] != shape:
            raise FedscError(
                f"{path} has images of (channels, height, width) = {array.shape[1:]}, "
                f"the model takes {shape}"
            )
        images.append(array)
    return names, torch.from_numpy(np.concatenate(images))


def list_images(path: Path) -> list[Path]:
    if not path.exists():
        raise FedscError(f"{path} does not exist")
    if path.is_file():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not files:
        raise FedscError(f"{path} holds no image (allowed: {', '.join(SUFFIXES)})")
    return files


def probabilities_as_csv(names: list[str], classes: tuple[str, ...], values: Tensor) -> str:
    """A row per image: its name, the likeliest class, and the probability of each."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["image", "class", *classes])
    for name, row in zip(names, values, strict=True):
        table.writerow([name, classes[int(row.argmax())], *(f"{p:.6f}" for p in row.tolist())])
    return text.getvalue()
