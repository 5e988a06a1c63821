"""The server: a federation whose engine asks nodes to train, and checks what they send back."""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from ..data.dataset import Dataset
from ..data.own import read_part
from ..data.partition import fingerprint
from ..engines.local import ClientData, MemoryOf, OnImages
from ..errors import FedscError
from ..experiments.folder import CLIENTS, RunFolder, is_run, refuse_in_use, remove_run
from ..experiments.runner import build, carry_out, load, number_of_threads
from ..federation import Federation
from ..files import read_object
from ..method import Upload
from ..progress import Lines
from ..state import State, to_device
from .config import Config, Job, NodeOptions, read_run_config
from .records import (
    Facts,
    expected_extra,
    is_run_name,
    on_one_line,
    problem_in,
    read_client,
    read_upload,
    to_record,
    write_task,
)

SECONDS_BETWEEN_LINES = 30.0
LONGEST_PAUSE = 1.0  # between two looks for replies
EVERY_ROUND = 0.0  # seconds between checkpoints: a resumed run repeats one round at most

NOT_SENT = Error(
    ErrorCode.MESSAGE_UNAVAILABLE,
    "its message could not be sent: the SuperLink did not take it, as one that is too large; "
    "Flower's log says why",
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        run_server(grid, context.run_config)
    except FedscError as error:
        print(f"fedsc: {error}", file=sys.stderr, flush=True)
        # Flower counts a run as failed only if something is raised, and shows where: keep it short.
        raise error.with_traceback(None) from None


def run_server(grid: Grid, config: Config) -> None:
    """The runs that are asked for, into run folders as `fedsc run` writes them."""
    options, jobs = read_run_config(config)
    folder = Path(options.out).expanduser()
    data = server_data(jobs[0], options)
    for number, job in enumerate(jobs):
        out = folder / job.name
        if options.overwrite and not options.resume and is_run(out):
            refuse_in_use(out)
            remove_run(out)
        if not (options.resume and (out / "summary.json").exists()):
            run_job(grid, number, job, options, data, out)
    print(f"fedsc: the runs are in {folder.resolve()}", file=sys.stderr, flush=True)


def run_job(
    grid: Grid, number: int, job: Job, options: NodeOptions, data: Dataset, out: Path
) -> None:
    spec = job.spec
    flower = flower_of(out, options.resume)
    nothing = np.empty(0, dtype=np.int64)
    parts = [nothing] * spec.num_clients if job.own_data else None
    with number_of_threads(spec.threads):
        federation, model_name = build(spec, data, job.method, None, None, out / CLIENTS, parts)
        federation.engine_name = "flower"
        federation.engine = NodesEngine(grid, federation, number, options, flower["run"])
        carry_out(
            *(federation, model_name, out, Lines(), options.resume, EVERY_ROUND),
            more_environment={"flower": flower},
        )


def flower_of(out: Path, resume: bool) -> dict[str, Any]:
    """What environment.json says of Flower. Nodes file what they remember under the run's name, so
    that is kept when the run is resumed; it is read here, before the folder is locked."""
    path = out / "environment.json"
    if not (resume and (out / "spec.json").exists()):
        return {"flwr": version("flwr"), "run": secrets.token_hex(8)}
    known = read_object(path)
    if "flower" not in known:  # it began on one machine
        known["flower"] = flower_of(out, resume=False)
        with RunFolder(out).alone():
            RunFolder(out).write_json(path.name, known)
    flower = known["flower"]
    if not isinstance(flower, dict) or not is_run_name(flower.get("run")):
        raise FedscError(f"{path} is damaged: it names no run of Flower")
    return flower


def server_data(job: Job, options: NodeOptions) -> Dataset:
    """The data set; where nodes bring their own images, its test part is all that is used.

    Then, too, all images of a `folder:` or `npz:` without a test part are test images.
    """
    name = job.spec.dataset
    if job.own_data and name.startswith(("folder:", "npz:")):
        images, labels, classes = read_part(name, "test", None)
        return Dataset(name, images, labels, images, labels, classes)
    return load(job.spec, options.data_dir or None)


class NodesEngine:
    """Stands where other engines train: sends the model to nodes and collects their uploads."""

    def __init__(
        self, grid: Grid, federation: Federation, job: int, options: NodeOptions, run: str
    ) -> None:
        self.grid, self.federation, self.options = grid, federation, options
        self.job, self.run = job, run
        self.images = federation.engine.images  # evaluation stays here
        self.nodes: dict[int, int] = {}  # node ids by client
        self.asked: set[int] = set()  # node ids that were asked who they are, in this round
        self.refused: dict[int, str] = {}  # why, by node id, as it was said last
        self.started = False

    def fit(
        self,
        round: int,
        clients: list[ClientData],
        global_model: State,
        received: State,
        memory_of: MemoryOf,
        on_images: OnImages,
    ) -> Iterator[tuple[Upload, State]]:
        """The uploads of the nodes that replied in order, by client; nodes keep their memories."""
        facts = self.facts()
        chosen = [client.id for client in clients]
        self.find_nodes(facts)
        content = RecordDict(
            {
                "model": to_record(global_model),
                "message": to_record(received),
                "task": write_task(round, facts),
            }
        )
        there = [client for client in chosen if client in self.nodes]
        for client in sorted(set(chosen) - set(there)):
            self.leave_out(round, client, "its node is not connected")
        replies = self.ask(there, content, MessageType.TRAIN, self.options.round_timeout, round)
        uploads = list(self.accept(round, there, replies, global_model, received))
        needed = max(1, math.ceil(self.options.min_replies * len(chosen)))
        if len(uploads) < needed:
            raise FedscError(
                f"round {round}: {len(uploads)} of {len(chosen)} nodes sent what can be used, "
                f"{needed} are needed (min-replies = {self.options.min_replies:g}); "
                "what is finished is saved: go on with resume = true"
            )
        return iter([(upload, {}) for upload in uploads])

    def accept(
        self,
        round: int,
        chosen: list[int],
        replies: dict[int, Message],
        model: State,
        message: State,
    ) -> Iterator[Upload]:
        """What can be used of the replies; what cannot is left out of this round."""
        federation = self.federation
        extra = None
        with contextlib.suppress(LookupError):  # a method of a user's may read its own loss terms
            extra = expected_extra(federation.method, federation.task, round, model, message)
        for client in chosen:
            reply = replies.get(client)
            if reply is None:
                late = f"no reply within {self.options.round_timeout:g} s"
                self.leave_out(round, client, late)
            elif problem := problem_in(reply):
                self.leave_out(round, client, problem)
            else:
                try:
                    upload = read_upload(reply.content, client, model, extra)
                except FedscError as error:
                    self.leave_out(round, client, str(error))
                    continue
                yield Upload(
                    upload.client,
                    upload.num_samples,
                    to_device(upload.model, federation.device),
                    to_device(upload.extra, federation.device),
                    upload.losses,
                    upload.measures,
                )

    def leave_out(self, round: int, client: int, reason: str) -> None:
        line = on_one_line(reason)
        self.federation.say(f"round {round}: client {client} is left out: {line}")

    # Nodes ---------------------------------------------------------------------------------------

    def find_nodes(self, facts: Facts) -> None:
        """Learn which node is which client; node ids are random, so each new one is asked. One that
        was refused is asked again in every round: the reason may have gone.

        Before the first round, wait until all are there or the time is up.
        """
        number = self.federation.task.num_clients
        self.asked = set(self.nodes.values())
        deadline = time.monotonic() + (0.0 if self.started else self.options.start_timeout)
        next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        while True:
            connected = set(self.grid.get_node_ids())
            self.nodes = {k: node for k, node in self.nodes.items() if node in connected}
            self.asked &= connected
            if connected - self.asked:
                self.introduce(sorted(connected - self.asked), facts)
            now = time.monotonic()
            if len(self.nodes) == number or now >= deadline:
                break
            if now >= next_line:
                self.federation.say(f"waiting for nodes: {len(self.nodes)} of {number} are here")
                next_line = now + SECONDS_BETWEEN_LINES
            time.sleep(LONGEST_PAUSE)
        self.started = True

    def introduce(self, new: list[int], facts: Facts) -> None:
        self.asked |= set(new)
        content = RecordDict({"task": write_task(0, facts)})
        messages = {node: Message(content, node, MessageType.QUERY) for node in new}
        replies = self.exchange(messages, min(self.options.round_timeout, 300.0), "introductions")
        for node in new:
            reply = replies.get(node)
            if reply is None:
                self.asked.discard(node)  # ask again: it may have been busy
                continue
            try:
                if problem := problem_in(reply):
                    raise FedscError(problem)
                client = read_client(reply.content, self.federation.task.num_clients)
                if client in self.nodes:
                    raise FedscError(f"partition {client} is taken")
            except FedscError as error:
                reason = on_one_line(str(error))
                if self.refused.get(node) != reason:
                    self.federation.say(f"node {node} cannot take part: {reason}")
                self.refused[node] = reason
                continue
            self.nodes[client] = node

    def ask(
        self, clients: list[int], content: RecordDict, kind: str, timeout: float, round: int
    ) -> dict[int, Message]:
        """The replies by client."""
        messages = {
            client: Message(content, self.nodes[client], kind, ttl=timeout, group_id=str(round))
            for client in clients
        }
        return self.exchange(messages, timeout, f"round {round}")

    def exchange(
        self, messages: dict[int, Message], timeout: float, what: str
    ) -> dict[int, Message]:
        """Send the messages and collect what comes back in time, under the same keys."""
        sent = set(self.grid.push_messages(list(messages.values())))
        waiting: dict[str, int] = {}
        replies: dict[int, Message] = {}
        for key, message in messages.items():
            # Pushing gives each message its id, and gives back those that the SuperLink has taken:
            # none of one request that is too large.
            if message.metadata.message_id in sent:
                waiting[message.metadata.message_id] = key
            else:
                replies[key] = Message(NOT_SENT, reply_to=message)
        began = time.monotonic()
        next_line, pause = began + SECONDS_BETWEEN_LINES, 0.05
        while waiting and time.monotonic() < began + timeout:
            for reply in self.grid.pull_messages(list(waiting)):
                answered = waiting.pop(reply.metadata.reply_to_message_id, None)
                if answered is not None:
                    replies[answered] = reply
            if time.monotonic() >= next_line:
                self.federation.say(f"{what}: waiting for {len(waiting)} of {len(messages)}")
                next_line += SECONDS_BETWEEN_LINES
            if waiting:
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
        return replies

    # The run -------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        data = self.federation.data
        return Facts(
            job=self.job,
            run=self.run,
            partition_hash=fingerprint(self.federation.parts),
            classes=data.classes,
            image_shape=data.image_shape,
            mean=data.mean,
            std=data.std,
            augment=data.augment,
        )
