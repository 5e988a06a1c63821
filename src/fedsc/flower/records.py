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

from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..data.dataset import Augment
from ..errors import FedscError
from ..method import Client, LocalResult, Method, Task, Upload
from ..state import State, flatten, to_device, unflatten


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
    task: dict[str, Any] = dict(content.config_records["task"])
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


def to_state(record: ArrayRecord) -> State:
    return unflatten(dict(record.to_torch_state_dict()))


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
        text = str(reply.content.config_records["problem"]["text"])
    else:
        return None
    return " ".join(text.split())


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
        unflatten(sent["model"]),
        unflatten(sent["extra"]),
        read_numbers(numbers["losses"]),
        read_numbers(numbers["measures"]),
    )


def flat_state(record: ArrayRecord) -> dict[str, torch.Tensor]:
    try:
        return dict(record.to_torch_state_dict())
    except Exception as error:  # the bytes are somebody else's
        raise FedscError(f"its arrays cannot be read: {error}") from None


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
    return {name: torch.tensor(value) for name, value in record.items()}


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
