"""Flower without its processes: messages travel as bytes, but within this process.

The apps, messages and records are the real ones; only the network is left out. Real simulations
and deployments are in tests/slow/test_flower.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsc.flower import client, server

Tamper = Callable[[Message, Message, int], Message | None]  # asked, reply, partition -> reply


def over_the_wire(message: Message) -> tuple[Message, int]:
    """The message as it arrives, and the bytes of all its objects."""
    message_id = message.object_id
    contents = {key: inner.deflate() for key, inner in get_all_nested_objects(message).items()}
    size = sum(map(len, contents.values()))
    arrived = inflate_object_from_contents(message_id, contents)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived, size


class InProcessGrid(Grid):
    """Nodes with random-looking ids, answering in reverse order of their partitions."""

    def __init__(self, config: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        ids = [9000 - 7 * i * i for i in range(len(nodes))]
        self.contexts = {
            node: Context(1, node, node_config, RecordDict(), config)
            for node, node_config in zip(ids, nodes, strict=True)
        }
        self.gone: set[int] = set()
        self.tamper: Tamper = lambda asked, reply, partition: reply
        self.replies: dict[str, Message] = {}
        self.bytes_down = self.bytes_up = 0

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.gone]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            asked, size = over_the_wire(message)
            context = self.contexts[message.metadata.dst_node_id]
            reply = client.app(asked, context)
            arrived, reply_size = over_the_wire(reply)
            if "model" in arrived.content.array_records:
                self.bytes_down += size
                self.bytes_up += reply_size
            kept = self.tamper(asked, arrived, int(context.node_config.get("partition-id", -1)))
            if kept is not None:
                self.replies[message.metadata.message_id] = kept
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        found = [reply for key, reply in self.replies.items() if key in wanted]
        return found[::-1]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


def partitions(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"partition-id": k, "num-partitions": number, **more} for k in range(number)]


def run_in_process(config: dict[str, Any], nodes: list[dict[str, Any]]) -> InProcessGrid:
    grid = InProcessGrid(config, nodes)
    server.run_server(grid, config)
    return grid
