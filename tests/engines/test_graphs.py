"""The graph engine against the sequential one: the same numbers from many clients at once.

On a CPU its slots run uncaptured, so scheduling, loading and observing are tested everywhere; what
only a GPU can do is marked `gpu` and skips itself without one.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedsc
from fedsc import METHODS, Outputs, Run
from fedsc.engines import graphs
from fedsc.engines.graphs import (
    AtOnce,
    GraphEngine,
    Place,
    Slot,
    default_slots,
    kernels_for,
    share_out,
)
from fedsc.engines.local import ClientData, Training
from fedsc.method import Batch, LocalResult, Moment, Task, Upload
from fedsc.methods import method_from_text
from fedsc.models import MLP, build_model
from fedsc.models.norm import ConvNorm
from fedsc.models.resnet import ResNet10
from fedsc.state import State

TEXTS = [
    *(name for name in METHODS if name != "fedcda"),
    "fedcda,warmup=0",
    "fedsc,u_mode=epoch,proto_source=eval,center=true",
    "fedsc,u_mode=ema,pool=bank,positives=mean_positive",
    "fedsc,init_protos=true",
    "fedsc+,rpcl_weight=1,positives=mean_positive",
    "fedproto,evaluation=ensemble",
    "moon,head=true",
]
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def run(method: str, **changes: Any) -> Run:
    """Sizes from a few images to dozens, so that some clients fill no batch and some several."""
    common: dict[str, Any] = {
        "rounds": 3,
        "epochs": 2,
        "train_limit": 400,
        "batch_size": 32,
        "participation": 0.6,
        "lr": 0.05,
        "compile": False,
        "precision": "fp32",
        "clip_norm": 10.0,
    }
    return fedsc.run("digits", method, **{**common, **changes})


def largest_difference(ours: Run, theirs: Run) -> float:
    """Relative, over all weights together, buffers included."""
    a, b = (
        torch.cat([w.double().flatten().cpu() for w in one.server["model"].values()])
        for one in (ours, theirs)
    )
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_method_gives_the_same_weights_as_one_by_one(text: str, norm: str) -> None:
    ours = run(text, engine="graphs", slots=2, norm=norm)
    theirs = run(text, engine="sequential", norm=norm)
    assert largest_difference(ours, theirs) < 1e-5
    for a, b in zip(ours.records, theirs.records, strict=True):
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.01)
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-3, abs=1e-6)
        assert a["cohort"] == b["cohort"]


def test_fixed_norms_give_the_same_weights_as_one_by_one() -> None:
    changes: dict[str, Any] = {"norm": "fixed", "rounds": 4}  # the last two with fixed statistics
    ours, theirs = (run("fedsc", engine=name, **changes) for name in ("graphs", "sequential"))
    assert largest_difference(ours, theirs) < 1e-5


def test_the_number_of_slots_does_not_change_the_result() -> None:
    one, many = (run("fedsc", engine="graphs", slots=slots) for slots in (1, 7))
    for name, tensor in one.server["model"].items():
        assert torch.equal(tensor, many.server["model"][name])


class Dropping(MLP):
    def forward(self, images: Tensor) -> Outputs:
        features = nn.functional.dropout(super().forward(images).features, 0.5, self.training)
        return Outputs(features, self.classifier(features))


def dropping(slots: int, device: str) -> Run:
    options: dict[str, Any] = {"rounds": 2, "epochs": 2, "batch_size": 32, "compile": False}
    options |= {"precision": "fp32", "engine": "graphs", "partition": "iid"}
    return fedsc.run("digits", "fedavg", Dropping, slots=slots, device=device, **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[gpu, needs_cuda])])
def test_what_a_client_drops_does_not_depend_on_its_neighbours(device: str) -> None:
    one, many = (dropping(slots, device) for slots in (1, 4))
    assert largest_difference(one, many) < 1e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[gpu, needs_cuda])])
def test_dropout_is_that_of_one_by_one(device: str) -> None:
    options: dict[str, Any] = {"rounds": 2, "epochs": 2, "batch_size": 32, "partition": "iid"}
    options |= {"device": device, "precision": "fp32"}
    alone = fedsc.run("digits", "fedavg", Dropping, engine="sequential", **options)
    assert largest_difference(dropping(4, device), alone) < 1e-5


@dataclasses.dataclass(frozen=True)
class ObservesLater(fedsc.FedAvg):
    """Counts the images of the last epoch and of a clean pass, but not in the first round."""

    name = "observes-later"

    def moments(self, round: int) -> tuple[Moment, ...]:
        return ("last_epoch", "end") if round > 1 else ()

    def start_observing(self, moment: Moment, task: Task) -> State:
        return {"seen": torch.zeros(())}

    def observe(self, moment: Moment, batch: Batch, totals: State) -> State:
        return {"seen": totals["seen"] + batch.weight.sum()}

    def upload(self, result: LocalResult) -> State:
        seen = [totals["seen"] for totals in result.observed.values()]
        return {"seen": torch.stack(seen) if seen else torch.zeros(2)}

    def aggregate(self, server: State, uploads: list[Upload], records: Any) -> State:
        seen = torch.stack([upload.extra["seen"] for upload in uploads])
        return {**super().aggregate(server, uploads, records), "seen": seen}


def test_what_is_observed_may_differ_from_round_to_round() -> None:
    options: dict[str, Any] = {"epochs": 1, "train_limit": 400, "batch_size": 16, "clients": 4}
    for engine in ("sequential", "graphs"):
        done = [
            fedsc.run("digits", ObservesLater(), engine=engine, rounds=rounds, **options)
            for rounds in (1, 2)
        ]
        assert not done[0].server["seen"].any()
        assert done[1].server["seen"].sum(0).tolist() == [400, 400]  # of all clients together


@dataclasses.dataclass(frozen=True)
class SaysMoreLater(fedsc.FedAvg):
    name = "says-more-later"

    def broadcast(self, server: State) -> State:
        return {"mean": server["model"]["classifier.bias"].mean()} if "told" in server else {}

    def aggregate(self, server: State, uploads: list[Upload], records: Any) -> State:
        return {**super().aggregate(server, uploads, records), "told": torch.ones(())}


@pytest.mark.parametrize("engine", ["graphs", "workers"])
def test_a_message_that_gains_a_tensor_is_refused_in_words(engine: str) -> None:
    with pytest.raises(fedsc.FedscError, match="gives mean, in the first round nothing: give"):
        fedsc.run("digits", SaysMoreLater(), rounds=2, epochs=1, train_limit=200, engine=engine)


def test_slots_on_two_devices_give_the_same_weights_as_on_one() -> None:
    """Two places on one device stand for two GPUs: each with its own data, message and slots."""
    spec = fedsc.RunSpec(
        engine="graphs", slots=4, rounds=2, epochs=1, train_limit=400, batch_size=16
    )
    models = []
    for number in (1, 2):
        torch.manual_seed(0)
        data = fedsc.load_dataset("digits")
        federation = fedsc.Federation(spec, data, fedsc.FedSC(), MLP(data.image_shape, 10))
        engine = federation.engine
        assert isinstance(engine, GraphEngine)
        if number == 2:
            engine.places.append(Place(torch.device("cpu"), data, engine))
        list(federation.rounds())
        assert len({id(slot.place) for slot in engine.slots}) == number
        models.append(federation.server["model"])
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name])


def test_a_convolutional_network_with_augmentation() -> None:
    changes: dict[str, Any] = {
        "model": "cnn",
        "augment": "crop-flip",
        "train_limit": 200,
        "rounds": 2,
        "epochs": 1,
    }
    ours = run("fedsc", engine="graphs", slots=2, **changes)
    assert largest_difference(ours, run("fedsc", engine="sequential", **changes)) < 1e-4


def clients_of(sizes: list[int]) -> list[ClientData]:
    return [ClientData(k, torch.arange(n), torch.zeros(2)) for k, n in enumerate(sizes)]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 10_000), max_size=60), slots=st.integers(1, 12))
def test_clients_are_shared_out_whole_largest_first_and_evenly(
    sizes: list[int], slots: int
) -> None:
    training = Training(0, 1, 64, 0.1, 0.9, 0.0, None, "none", "fp32")
    queues = share_out(clients_of(sizes), slots, training)
    dealt = [client.id for queue in queues for client in queue]
    assert sorted(dealt) == list(range(len(sizes)))
    for queue in queues:
        in_order = [client.num_samples for client in queue]
        assert in_order == sorted(in_order, reverse=True)
    # Greedy, largest first: no queue is longer than the shortest by more than one client's steps.
    steps = [[-(-client.num_samples // 64) for client in queue] for queue in queues]
    shortest = min(sum(each) for each in steps)
    assert all(sum(each) - each[-1] <= shortest for each in steps if each)


def test_a_few_slots_are_enough_for_any_number_of_clients() -> None:
    assert default_slots(3) == 3
    assert default_slots(10_000) == default_slots(100) <= 10
    assert default_slots(100) < default_slots(100, at_once=True) <= 10
    assert default_slots(100, num_devices=2) == 2 * default_slots(100)


class Branching(nn.Module):
    """Looks at its own values, which a captured graph cannot."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, images: Tensor) -> Outputs:
        features = self.body(images)
        if features.sum() > 1e9:
            features = features / 2
        return Outputs(features, self.classifier(features))


@pytest.fixture
def exact_convolutions() -> Iterator[None]:
    """cuDNN in full float32, and with the same algorithm every time."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = False, True
    yield
    cudnn.allow_tf32, cudnn.deterministic = before


@gpu
@needs_cuda
@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("text", TEXTS)
def test_captured_steps_give_the_same_weights_as_one_by_one(text: str) -> None:
    changes: dict[str, Any] = {"device": "cuda", "model": "resnet10", "rounds": 2, "epochs": 1}
    ours = run(text, engine="graphs", slots=3, **changes)
    assert largest_difference(ours, run(text, engine="sequential", **changes)) < 1e-4


@gpu
@needs_cuda
def test_what_cannot_be_captured_goes_on_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    done = fedsc.run(
        "digits", "fedavg", Branching, rounds=2, epochs=1, device="cuda", compile=False
    )
    assert len(done.records) == 2
    assert "cannot capture" in capsys.readouterr().err


def as_it_is(conv: nn.Conv2d, norm: nn.Module, x: Tensor) -> Tensor:
    return norm(conv(x))


AS_IT_IS = AtOnce(as_it_is, lambda network, images: None)


def from_module(name: str) -> Exception:
    """An error as the code of such a module raises it."""
    return type("CompileError", (Exception,), {"__module__": name})("no ptxas")


def test_a_step_that_triton_cannot_compile_goes_on_with_cudnn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here on a CPU, where the kernels are never chosen: as if they had been."""
    engines: list[GraphEngine] = []
    prepare, init = Slot.prepare, GraphEngine.__init__

    def with_kernels(engine: GraphEngine, *arguments: Any) -> None:
        init(engine, *arguments)
        engine.at_once = AS_IT_IS
        engines.append(engine)

    def prepare_without_kernels(slot: Slot, *arguments: Any) -> None:
        if engines[0].at_once is not None:
            raise from_module("triton.compiler.errors")
        prepare(slot, *arguments)

    monkeypatch.setattr(GraphEngine, "__init__", with_kernels)
    monkeypatch.setattr(Slot, "prepare", prepare_without_kernels)
    changes: dict[str, Any] = {"model": "cnn", "rounds": 1, "epochs": 1, "partition": "iid"}
    done = run("fedavg", engine="graphs", slots=2, **changes)
    assert len(done.records) == 1
    assert "cannot use kernels of our own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "model", "convolutions", "resnet"),
    [
        ("fedavg", "cnn", 2, False),
        ("fedavg", "resnet10", 12, True),
        ("fedrcl", "resnet10", 12, False),  # reads what lies between the blocks
        ("moon,head=true", "resnet10", 12, False),  # another model around it, which might
    ],
)
def test_only_captured_slots_have_kernels_of_our_own(
    method: str, model: str, convolutions: int, resnet: bool
) -> None:
    spec = fedsc.RunSpec(method=method, engine="graphs", device="cpu", rounds=1)
    data = small_colour_images() if model == "resnet10" else fedsc.load_dataset("digits")
    network = build_model(model, data.image_shape, data.num_classes)
    engine = fedsc.Federation(spec, data, method_from_text(method), network).engine
    assert isinstance(engine, GraphEngine)
    engine.at_once = AS_IT_IS
    for captures in (True, False):
        slot = Slot(engine, engine.home, captures)
        layers = [layer for layer in slot.model.modules() if isinstance(layer, ConvNorm)]
        expected = as_it_is if captures else None
        assert [layer.at_once for layer in layers] == [expected] * convolutions
        networks = [layer for layer in slot.model.modules() if isinstance(layer, ResNet10)]
        assert len(networks) == (model == "resnet10")
        expected_network = AS_IT_IS.resnet if captures and resnet else None
        assert all(network.at_once is expected_network for network in networks)


def small_colour_images() -> fedsc.Dataset:
    images, labels = torch.zeros(40, 3, 8, 8, dtype=torch.uint8), torch.arange(40) % 10
    return fedsc.Dataset("colours", images, labels, images, labels, tuple("0123456789"))


@pytest.mark.parametrize("module", ["triton.compiler.errors", "torch._inductor.exc", "mine"])
def test_errors_of_what_is_not_in_use_are_raised(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled here, and no kernel is of Triton."""

    def fail(slot: Slot, *arguments: Any) -> None:
        raise from_module(module)

    monkeypatch.setattr(Slot, "prepare", fail)
    with pytest.raises(Exception, match="no ptxas"):
        run("fedavg", engine="graphs", slots=2, partition="iid", participation=1.0)


def test_slots_are_halved_until_they_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a card with room for two; the slots given up must be gone, or it never fits."""
    alive: weakref.WeakSet[Slot] = weakref.WeakSet()
    prepare = Slot.prepare

    def prepare_if_it_fits(slot: Slot, *arguments: Any) -> None:
        alive.add(slot)
        if len(alive) > 2:
            raise torch.cuda.OutOfMemoryError
        prepare(slot, *arguments)

    monkeypatch.setattr(Slot, "prepare", prepare_if_it_fits)
    changes: dict[str, Any] = {"participation": 1.0, "partition": "iid"}
    halved = run("fedsc", engine="graphs", slots=8, **changes)
    said = capsys.readouterr().err
    assert "going on with 4 clients at once" in said
    assert "going on with 2 clients at once" in said
    monkeypatch.undo()
    alone = run("fedsc", engine="sequential", **changes)
    assert largest_difference(halved, alone) < 1e-5


@gpu
@needs_cuda
def test_a_run_that_meets_out_of_memory_goes_on_with_fewer_slots(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes: dict[str, Any] = {"device": "cuda", "model": "resnet10", "rounds": 1, "epochs": 1}
    changes |= {"engine": "graphs", "batch_size": 64, "participation": 1.0}
    changes |= {"partition": "iid", "train_limit": None}  # so that every client fills a batch

    def free_all() -> None:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def reserved(slots: int) -> int:
        """At most at any time, by a run with so many slots."""
        free_all()
        torch.cuda.reset_peak_memory_stats()
        run("fedavg", slots=slots, **changes)
        return torch.cuda.max_memory_reserved()

    one, eight = reserved(1), reserved(8)
    free_all()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((one + eight) / 2 / total)
    try:
        done = run("fedavg", slots=8, **changes)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(done.records) == 1
    assert "out of GPU memory: going on with 4 clients at once" in capsys.readouterr().err


@gpu
@needs_cuda
@pytest.mark.usefixtures("exact_convolutions")
def test_a_run_with_our_kernels_is_as_close_to_float32_as_one_with_cudnn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two whole rounds of compiled, captured steps in bf16."""
    own = kernels_for([torch.device("cuda")])
    if own is None:
        pytest.skip("needs a Hopper GPU and Triton")
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (640, 3, 32, 32), dtype=torch.uint8, generator=draw)
    labels = torch.arange(640) % 10
    images[torch.arange(640), 0, labels * 3] = 255  # a bright row tells the class
    data = fedsc.Dataset("rows", images, labels, images, labels, tuple("0123456789"))
    options: dict[str, Any] = {"rounds": 2, "epochs": 2, "clients": 4, "partition": "iid"}
    options |= {"device": "cuda", "engine": "graphs", "slots": 3}
    exact = fedsc.run(data, "fedavg", "resnet10", compile=False, precision="fp32", **options)
    by_layers = own._replace(resnet=lambda network, images: None)
    far: list[float] = []
    for kernels in (None, own, by_layers):
        monkeypatch.setattr(graphs, "kernels_for", lambda devices, found=kernels: found)
        run_in_bf16 = fedsc.run(data, "fedavg", "resnet10", precision="bf16", **options)
        far.append(largest_difference(run_in_bf16, exact))
    cudnn, *ours = far
    assert min(ours) > 0
    assert max(ours) < 1.2 * cudnn


@gpu
@needs_cuda
def test_a_compiled_run_in_bf16_learns() -> None:
    done = fedsc.run("digits", "fedsc", rounds=10, epochs=5, lr=0.05, device="cuda")
    assert done.accuracy > 0.8
