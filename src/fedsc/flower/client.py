"""The node: one client of the federation, with its data and its memory on its own machine.

Node configuration (`flower-supernode --node-config`):

    partition-id=2                 which client of the federation this node is, from 0
    data="folder:/data/x-rays"     its own images (or npz:PATH), where partition = own
    data-dir="/data"               folder with shared data sets
    state-dir="/var/lib/fedsc"     folder for what a client remembers between rounds
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..data.dataset import Dataset
from ..data.own import FORMS, read_part
from ..data.partition import fingerprint
from ..errors import FedscError
from ..experiments.runner import build, load, number_of_threads
from ..federation import Federation
from ..state import to_device
from .config import Job, read_run_config
from .memory import NodeMemory, default_state_dir
from .records import Facts, read_state_like, read_task, write_problem, write_upload

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Say which client this node is, once its data and the model have been found in order."""

    def work() -> RecordDict:
        _, facts = read_task(message.content)
        _, client = node_of(context, facts)
        return RecordDict({"node": ConfigRecord({"partition-id": client})})

    return reply(message, work)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One client's part of a round."""

    def work() -> RecordDict:
        content = message.content
        round, facts = read_task(content)
        node, client = node_of(context, facts)
        state_dir = context.node_config.get("state-dir")
        folder = Path(str(state_dir)).expanduser() if state_dir else default_state_dir()
        memory = NodeMemory(context.state, folder, facts.run, client)
        remembered = memory.recall(round)
        if remembered is None:
            remembered = node.method.init_client(node.task)
        model = read_state_like(content, "model", node.server["model"])
        received = read_state_like(content, "message", node.message())
        model, received = (to_device(state, node.device) for state in (model, received))
        with number_of_threads(node.spec.threads):
            ((upload, new_memory),) = node.engine.fit(
                round, [node.clients[client]], model, received, lambda _: remembered, node.on_images
            )
        if new_memory:
            memory.keep(round, new_memory)
        return write_upload(upload)

    return reply(message, work)


def reply(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The answer to a message; what a person can put right is said in one line."""
    try:
        content = work()
    except FedscError as error:
        content = write_problem(str(error))
    return Message(content, reply_to=message)


def node_of(context: Context, facts: Facts) -> tuple[Federation, int]:
    """The federation as this node sees it, with the data it has; and which client it is."""
    options, jobs = read_run_config(context.run_config)
    if facts.job >= len(jobs):
        raise FedscError(f"the server asks for run {facts.job} of {len(jobs)}")
    job = jobs[facts.job]
    spec, own = job.spec, context.node_config
    client = own.get("partition-id")
    if not isinstance(client, int) or not 0 <= client < spec.num_clients:
        raise FedscError(
            f"partition-id = {client} in the node's configuration "
            f"(allowed: 0 to {spec.num_clients - 1})"
        )
    if job.own_data:
        return node_with_own_data(job, facts, str(own.get("data", "")), client), client
    data_dir = str(own.get("data-dir", options.data_dir))
    return node_with_shared_data(job, facts, data_dir), client


# Nodes are kept, because in a simulation one process plays many of them.


@functools.lru_cache(maxsize=1)
def node_with_shared_data(job: Job, facts: Facts, data_dir: str) -> Federation:
    spec = job.spec
    with number_of_threads(spec.threads):
        federation, _ = build(spec, load(spec, data_dir or None), job.method)
    if fingerprint(federation.parts) != facts.partition_hash:
        raise FedscError(
            f"{spec.dataset} is dealt to the clients in another way here than on the server: "
            "is it the same data and the same version of fedsc?"
        )
    return federation


@functools.lru_cache(maxsize=1)
def node_with_own_data(job: Job, facts: Facts, text: str, client: int) -> Federation:
    """All images of the node belong to this client, and are seen as the server says."""
    spec = job.spec
    if not text:
        raise FedscError(f"partition = own, but the node's configuration has no data={FORMS}")
    images, labels, classes = read_part(text, "train", facts.classes)
    if tuple(images.shape[1:]) != facts.image_shape:
        raise FedscError(
            f"images in {text} have (channels, height, width) = {tuple(images.shape[1:])}, "
            f"the federation's have {facts.image_shape}"
        )
    normalisation = facts.mean, facts.std, facts.augment
    data = Dataset(spec.dataset, images, labels, images, labels, classes, *normalisation)
    nothing = np.empty(0, dtype=np.int64)
    parts = [np.arange(len(labels)) if k == client else nothing for k in range(spec.num_clients)]
    with number_of_threads(spec.threads):
        federation, _ = build(spec, data, job.method, parts=parts)
    return federation
