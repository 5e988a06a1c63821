"""States and uploads as Flower's records, and back with every check that a server needs.

server -> node   model    ArrayRecord   the global model
                 message  ArrayRecord   what the method's `broadcast` gives
                 task     ConfigRecord  the round, and the facts that all must share
node -> server   model    ArrayRecord   the node's weights
                 extra    ArrayRecord   what the method's `upload` gives
                 facts    MetricRecord  partition id and number of images
                 losses   MetricRecord  mean of each term of the loss in the last epoch
                 measures MetricRecord  what the method's `measure` gives
or               problem  ConfigRecord  why the node cannot take part
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..data.dataset import Augment
from ..data.npz import check_header
from ..errors import FedscError, in_words
from ..method import Client, LocalResult, Method, Task, Upload
from ..report.checks import Check, is_count, is_image_shape, is_number, is_text, list_of, wrong_in
from ..state import State, check_like, flatten, to_device, unflatten

LONGEST_NAME = 200  # of a tensor or a number
LONGEST_REASON = 500  # characters of what a node says


def is_run_name(value: Any) -> bool:
    """As the server draws it; nodes name a folder by it."""
    return isinstance(value, str) and re.fullmatch("[0-9a-zA-Z]{1,64}", value) is not None


TASK: dict[str, Check] = {
    **{"round": is_count, "job": is_count, "run": is_run_name, "partition-hash": is_text},
    **{"classes": list_of(is_text, 1), "image-shape": is_image_shape},
    **dict.fromkeys(("mean", "std"), list_of(is_number, 1)),
    "augment": lambda value: value in get_args(Augment),
}


@dataclass(frozen=True)
class Facts:
    """What the server tells every node of the data, so that all see images alike."""

    job: int  # which of the runs that the run configuration asks for
    run: str  # of this training: the same after it is resumed
    partition_hash: str  # of shared data: whether both sides deal it alike
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment


def write_task(round: int, facts: Facts) -> ConfigRecord:
    return ConfigRecord(
        {
            "round": round,
            "job": facts.job,
            "run": facts.run,
            "partition-hash": facts.partition_hash,
            "classes": list(facts.classes),
            "image-shape": list(facts.image_shape),
            "mean": list(facts.mean),
            "std": list(facts.std),
            "augment": facts.augment,
        }
    )


def read_task(content: RecordDict) -> tuple[int, Facts]:
    task: dict[str, Any] = dict(content.config_records.get("task", {}))
    wrong = wrong_in(task, TASK)
    if not wrong and {len(task["mean"]), len(task["std"])} != {task["image-shape"][0]}:
        wrong = "its normalisation has other channels than its images"
    if wrong:
        raise FedscError(f"the server's task cannot be used: {wrong}")
    facts = Facts(
        job=task["job"],
        run=task["run"],
        partition_hash=task["partition-hash"],
        classes=tuple(task["classes"]),
        image_shape=tuple(task["image-shape"]),
        mean=tuple(task["mean"]),
        std=tuple(task["std"]),
        augment=task["augment"],
    )
    return task["round"], facts


def to_record(state: State) -> ArrayRecord:
    return ArrayRecord(flatten(state))


def read_state_like(content: RecordDict, name: str, expected: State) -> State:
    """A state that the server or this node itself has sent; must have all that is expected."""
    if name not in content.array_records:
        raise FedscError(f"the record '{name}' is missing")
    state = nested(flat_state(content.array_records[name]))
    try:
        check_like(state, expected)
    except ValueError as error:
        raise FedscError(f"the record '{name}' cannot be used: {error}") from None
    return state


def write_upload(upload: Upload) -> RecordDict:
    return RecordDict(
        {
            "model": to_record(upload.model),
            "extra": to_record(upload.extra),
            "facts": MetricRecord(
                {"partition-id": upload.client, "num-samples": upload.num_samples}
            ),
            "losses": MetricRecord({name: float(v) for name, v in upload.losses.items()}),
            "measures": MetricRecord({name: float(v) for name, v in upload.measures.items()}),
        }
    )


def write_problem(text: str) -> RecordDict:
    return RecordDict({"problem": ConfigRecord({"text": text})})


def problem_in(reply: Message) -> str | None:
    """Why a node did not do what it was asked for, on one line; None: it did."""
    if reply.has_error():
        text = f"{reply.error.reason}"
    elif "problem" in reply.content.config_records:
        text = str(reply.content.config_records["problem"].get("text", "it does not say why"))
    else:
        return None
    return on_one_line(text)


def on_one_line(text: str) -> str:
    """What others say, with nothing that a terminal would take for a command."""
    line = " ".join(text.split())[:LONGEST_REASON]
    return "".join(c if c.isprintable() else "?" for c in line) or "no reason"


def read_client(content: RecordDict, num_clients: int) -> int:
    """Which client a node says it is."""
    client = content.config_records.get("node", ConfigRecord()).get("partition-id")
    if not is_count(client) or client >= num_clients:  # type: ignore[operator]
        raise FedscError(f"it says it is partition {client!r} (allowed: 0 to {num_clients - 1})")
    return int(client)  # type: ignore[arg-type]


def read_upload(content: RecordDict, client: int, model: State, extra: State | None) -> Upload:
    """A node's upload, or a FedscError that says what is wrong with it.

    `model` and `extra` have the names, shapes and types that are due; None: the method's upload
    cannot be known beforehand.
    """
    arrays, numbers = content.array_records, content.metric_records
    missing = {"model", "extra"} - arrays.keys() | {"facts", "losses", "measures"} - numbers.keys()
    if missing:
        raise FedscError(f"it sent no {', '.join(sorted(missing))}")
    facts = numbers["facts"]
    if facts.get("partition-id") != client:
        raise FedscError(f"it says it is partition {facts.get('partition-id')}, not {client}")
    num_samples = facts.get("num-samples")
    if not isinstance(num_samples, int) or num_samples < 1:
        raise FedscError(f"it has num-samples = {num_samples}")
    sent = {name: flat_state(arrays[name]) for name in ("model", "extra")}
    for name, due in (("model", model), ("extra", extra)):
        check_state(name, sent[name], None if due is None else flatten(due))
    return Upload(
        client,
        num_samples,
        nested(sent["model"]),
        nested(sent["extra"]),
        read_numbers(numbers["losses"]),
        read_numbers(numbers["measures"]),
    )


def flat_state(record: ArrayRecord) -> dict[str, torch.Tensor]:
    check_names(record)
    try:
        return {name: to_tensor(array) for name, array in record.items()}
    except Exception as error:  # the bytes are somebody else's
        raise FedscError(f"its arrays cannot be read: {in_words(error)}") from None


def to_tensor(array: Array) -> torch.Tensor:
    """As Flower does it, but no room is made for more than the bytes that are there."""
    if array.stype != "numpy.ndarray":
        raise ValueError(f"an array is {array.stype[:80]!r}, not numpy.ndarray")
    check_header(io.BytesIO(array.data), len(array.data))
    return torch.from_numpy(np.load(io.BytesIO(array.data), allow_pickle=False))


def nested(flat: dict[str, torch.Tensor]) -> State:
    try:
        return unflatten(flat)
    except ValueError as error:
        raise FedscError(f"its arrays cannot be used: {error}") from None


def check_names(record: Mapping[str, Any]) -> None:
    """Names are said to people, and kept in run folders."""
    for name in record:
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise FedscError(f"it has an impossible name, {name[:LONGEST_NAME]!r}")


def check_state(
    what: str, sent: dict[str, torch.Tensor], due: dict[str, torch.Tensor] | None
) -> None:
    """Names, shapes and types as they are due, and no NaN or infinity."""
    if due is not None and sent.keys() != due.keys():
        odd = sorted(sent.keys() ^ due.keys())
        raise FedscError(f"its {what} has other tensors than it should: {', '.join(odd[:3])}")
    for name, tensor in sent.items():
        if due is not None:
            shape, wanted = tuple(tensor.shape), tuple(due[name].shape)
            if shape != wanted:
                raise FedscError(f"its {what}/{name} has shape {shape}, not {wanted}")
            if tensor.dtype != due[name].dtype:
                raise FedscError(f"its {what}/{name} is {tensor.dtype}, not {due[name].dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise FedscError(f"its {what}/{name} holds NaN or infinity")


def read_numbers(record: MetricRecord) -> State:
    check_names(record)
    for name, value in record.items():
        if not is_number(value):
            raise FedscError(f"its {name} is no number")
    return {name: torch.tensor(float(value)) for name, value in record.items()}  # type: ignore[arg-type]


def expected_extra(method: Method, task: Task, round: int, model: State, message: State) -> State:
    """An upload's `extra` of the right names and shapes: that of a client without any images."""
    observed: dict[str, State] = {
        moment: method.start_observing(moment, task) for moment in method.moments(round)
    }
    cpu = torch.device("cpu")
    model, message = to_device(model, cpu), to_device(message, cpu)
    nobody = Client(torch.tensor(0), torch.zeros(task.num_classes), method.init_client(task))
    losses = {"loss": torch.zeros(())}
    return method.upload(LocalResult(model, losses, observed, message, nobody))
