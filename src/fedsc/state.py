"""States: dicts of tensors, perhaps nested. Saved with safetensors, sent over the wire."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

State = dict[str, Any]  # name -> Tensor or State
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # flat: name -> shape and type


def flatten(state: State, prefix: str = "") -> dict[str, Tensor]:
    """A nested state as one flat dict with keys like "model/fc.weight", ready for safetensors."""
    flat: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value.detach().cpu().contiguous()
    # safetensors refuses one tensor under two names, which is a natural thing to write.
    seen: set[int] = set()
    for name, tensor in flat.items():
        if tensor.data_ptr() in seen:
            flat[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return flat


def unflatten(flat: dict[str, Tensor]) -> State:
    """The nested state of `flatten`."""
    state: State = {}
    for name, tensor in flat.items():
        *path, last = name.split("/")
        inner = state
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise ValueError(f"'{name[:80]}' is both a tensor and a group of tensors")
        inner[last] = tensor
    return state


def read_state(content: bytes) -> State:
    """The nested state in a safetensors file; raises ValueError if it is none."""
    try:
        return unflatten(load(content))
    except (SafetensorError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"{error}") from None


def check_like(state: State, expected: State) -> None:
    """Raises ValueError unless all that is expected is there, in its shape and type."""
    problem = lacking(layout(state), layout(expected))
    if problem:
        raise ValueError(problem)


def layout(state: State, prefix: str = "") -> Layout:
    """The names, shapes and types of a state's tensors."""
    found: Layout = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found.update(layout(value, f"{prefix}{name}/"))
        else:
            found[prefix + name] = tuple(value.shape), value.dtype
    return found


def lacking(found: Layout, expected: Layout) -> str | None:
    """The first expected tensor that is missing or of another shape or type. More may be there."""
    for name, (shape, dtype) in expected.items():
        if found.get(name) != (shape, dtype):
            is_now = found.get(name)
            has = "missing" if is_now is None else f"{is_now[1]} of shape {is_now[0]}"
            return f"{name} is {has}, expected {dtype} of shape {shape}"
    return None


def to_device(state: State, device: torch.device) -> State:
    """The same nested state with every tensor on the device."""
    return {
        name: to_device(value, device) if isinstance(value, dict) else value.to(device)
        for name, value in state.items()
    }


def num_bytes(state: State) -> int:
    """What a state weighs, on the wire without framing or in memory."""
    return sum(
        num_bytes(value) if isinstance(value, dict) else value.numel() * value.element_size()
        for value in state.values()
    )
