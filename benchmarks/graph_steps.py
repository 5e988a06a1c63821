"""A training step of the graph engine on a GPU, in bare replays: microseconds, and its kernels.

    python benchmarks/graph_steps.py
    python benchmarks/graph_steps.py --method fedprox --kernels fused --slots 8 --profile 30

ResNet-10, batches of 64, bf16, random images. `fused` is what a run takes on a Hopper GPU, `layers`
are our convolutions one by one, `cudnn` none of our kernels. With several slots, a step is the time
in which all of them make one, divided by their number.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fedsc import Federation, RunSpec
from fedsc.engines import graphs
from fedsc.engines.graphs import AtOnce, GraphEngine, Slot
from fedsc.experiments.bench import random_data
from fedsc.methods import method_from_text
from fedsc.models import build_model

PROFILED = 8  # steps


def prepared(method: str, kernels: str, slots: int) -> list[Slot]:
    """Slots with their graphs captured, after a first short round."""
    data = random_data("resnet10", torch.device("cuda"), 50_000)
    spec = RunSpec(method=method, model="resnet10", rounds=1, epochs=1, slots=slots)
    torch.manual_seed(0)
    model = build_model("resnet10", data.image_shape, data.num_classes, spec.norm)
    own = graphs.kernels_for([torch.device("cuda")])
    chosen: dict[str, AtOnce | None] = {"cudnn": None}
    if own is not None:
        chosen |= {"fused": own, "layers": own._replace(resnet=lambda network, images: None)}
    if kernels not in chosen:
        sys.exit("there are kernels of our own for Hopper GPUs only: take --kernels cudnn")
    before, graphs.kernels_for = graphs.kernels_for, lambda devices: chosen[kernels]
    try:
        torch.compiler.reset()
        federation = Federation(spec, data, method_from_text(method), model)
        federation.run_round(1)
    finally:
        graphs.kernels_for = before
    engine = federation.engine
    assert isinstance(engine, GraphEngine)
    return engine.slots


def replay(slots: list[Slot], steps: int) -> None:
    for step in range(steps):
        for slot in slots:
            with torch.cuda.stream(slot.stream):
                if step % PROFILED == 0:
                    slot.static["next"].zero_()  # the plan of a small client is soon at its end
                slot.graphs[False].replay()
    torch.cuda.synchronize()


def step_time(slots: list[Slot], steps: int) -> float:
    """Microseconds."""
    replay(slots, 2 * PROFILED)
    began = time.perf_counter()
    replay(slots, steps)
    return (time.perf_counter() - began) / steps / len(slots) * 1e6


def print_kernels(slot: Slot, most: int) -> None:
    """Those of one slot alone that take longest, with their number and time in a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        replay([slot], PROFILED)
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            seconds[event.name] += event.time_range.elapsed_us()
            number[event.name] += 1
    print(f"{number.total() / PROFILED:.0f} kernels, {seconds.total() / PROFILED:.0f} us")
    for name, total in seconds.most_common(most):
        print(f"{total / PROFILED:8.1f} us  {number[name] / PROFILED:4.0f}x  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--kernels", action="append", choices=["fused", "layers", "cudnn"])
    parser.add_argument("--slots", type=int, action="append", help="clients at once")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--profile", type=int, default=0, help="list so many kernels")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU")
    numbers = asked.slots or [8, 4, 1]
    for kernels in asked.kernels or ["fused", "layers"]:
        slots = prepared(asked.method, kernels, max(numbers))
        for number in numbers:
            found = step_time(slots[:number], asked.steps)
            print(f"{asked.method}, {kernels}, {number} slots: {found:.0f} us a step", flush=True)
        if asked.profile:
            print_kernels(slots[0], asked.profile)


if __name__ == "__main__":
    main()
