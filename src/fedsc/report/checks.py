"""Is a file of a run folder what it has to be? Whoever draws it need not ask again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
MOST_GROUPS = 10_000  # classes or clients


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return is_whole(value) and 0 <= value < 2**53


def is_group(value: Any) -> bool:
    return is_whole(value) and 0 <= value < MOST_GROUPS


def is_share(value: Any) -> bool:
    return value is None or (is_number(value) and 0 <= value <= 1)


def is_text(value: Any) -> bool:
    """Printable: nothing that a terminal or a picture would take for a command."""
    return isinstance(value, str) and value.replace("\n", " ").isprintable()


def is_image_shape(value: Any) -> bool:
    """(channels, height, width)"""
    return list_of(is_count, 3)(value) and len(value) == 3 and 0 < min(value) <= max(value) <= 4096


def is_said(value: Any) -> bool:
    return is_text(value) or is_number(value)


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def may_be(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check, least: int = 0) -> Check:
    def is_list(value: Any) -> bool:
        return isinstance(value, list) and len(value) >= least and all(map(check, value))

    return is_list


def table_of(check: Check, least: int = 1) -> Check:
    """Rows of one length."""
    rows = list_of(list_of(check, least), least)
    return lambda value: rows(value) and len({len(row) for row in value}) == 1


def dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def record_of(checks: dict[str, Check]) -> Check:
    return lambda value: not wrong_in(value, checks)


def wrong_in(value: Any, checks: dict[str, Check], optional: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a JSON object, in words; other keys may hold anything."""
    if not isinstance(value, dict):
        return "it is no JSON object"
    for name, check in checks.items():
        if name not in value:
            if name not in optional:
                return f"it lacks '{name}'"
        elif not check(value[name]):
            return f"'{name}' is {shortened(value[name])}"
    return None


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


numbers = list_of(is_number, 2)
surface = table_of(may_be(is_number), 2)

SPEC: dict[str, Check] = {
    **dict.fromkeys(("label", "dataset", "partition", "model", "hash"), is_text),
    **dict.fromkeys(("seed", "rounds", "clients", "epochs"), is_count),
    "participation": lambda value: is_number(value) and 0 < value <= 1,
    "long_tail": may_be(is_number),
    "few_shot": may_be(is_count),
    "method": lambda value: isinstance(value, dict) and is_text(value.get("name")),
    **dict.fromkeys(("dropout", "straggler"), is_number),
    **dict.fromkeys(("attack", "dp_unit"), may_be(is_text)),
    **dict.fromkeys(("attackers", "target_epsilon", "delta", "dp_clip"), may_be(is_number)),
    **dict.fromkeys(("dp_noise", "dp_feature_clip", "dp_prototype_noise"), may_be(is_number)),
}
OPTIONAL_IN_A_SPEC = (  # older runs do not have them
    *("dropout", "straggler", "attack", "attackers", "dp_unit", "target_epsilon", "delta"),
    *("dp_clip", "dp_noise", "dp_feature_clip", "dp_prototype_noise"),
)
RECORD: dict[str, Check] = {
    "round": is_count,
    **dict.fromkeys(("accuracy", "calibrated", "summed", "averaged"), is_share),
    "bytes_up": is_number,
    "bytes_down": is_number,
    "timing": lambda value: dict_of(is_number)(value) and "seconds" in value,
    "train_loss": dict_of(may_be(is_number)),
    "per_class": list_of(may_be(is_number), 1),
    **dict.fromkeys(
        ("accuracy_ci95", "head", "middle", "tail", "nearest_prototype", "client_worst"),
        may_be(is_number),
    ),
    **dict.fromkeys(("client_mean", "ece", "prototype_drift"), may_be(is_number)),
    **dict.fromkeys(
        ("epsilon", "prototypes_bounded", "prototype_rows", "min_u"), may_be(is_number)
    ),
    **dict.fromkeys(("cohort", "dropped", "late", "left_out", "attackers"), list_of(is_count)),
    "rejected": list_of(record_of({"client": is_count, "reason": is_text})),
    "aggregation": is_text,
    "diverged": is_bool,
}
NEEDED_IN_A_RECORD = ("round", "accuracy", "bytes_up", "bytes_down", "timing", "train_loss")
OPTIONAL_IN_A_RECORD = tuple(name for name in RECORD if name not in NEEDED_IN_A_RECORD)

IMAGES: dict[str, Check] = {  # in partition.json
    "shape": is_image_shape,
    **dict.fromkeys(("mean", "std"), list_of(is_number, 1)),
}
FILES: dict[str, dict[str, Check]] = {
    "partition": {"classes": list_of(is_text, 1), "class_counts": table_of(is_count)},
    "landscape": {
        "grid": numbers,
        "loss": surface,
        "models": list_of(
            record_of({"name": is_text, "at": lambda at: numbers(at) and len(at) == 2})
        ),
        "around": record_of(
            {"grid": numbers, "models": list_of(record_of({"name": is_text, "loss": surface}))}
        ),
    },
    "embedding": {
        "x": list_of(may_be(is_number), 1),
        "y": list_of(may_be(is_number), 1),
        "label": list_of(is_group),
        "classes": list_of(is_text, 1),
        "client": may_be(list_of(may_be(is_group))),
    },
    "theory": {
        "bound": list_of(may_be(is_number), 1),
        "observed": list_of(may_be(is_number), 1),
        "conditions": list_of(
            record_of({"name": is_text, "needs": is_said, "has": is_said, "holds": is_bool})
        ),
        "notes": list_of(is_text),
        "constants": dict_of(is_number),
    },
}


def check_file(kind: str, found: Any, optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless partition.json, landscape.json and so on hold what they have to."""
    wrong = wrong_in(found, FILES[kind], optional) or wrong_sizes(kind, found)
    if wrong:
        raise ValueError(wrong)


def wrong_sizes(kind: str, found: dict[str, Any]) -> str | None:
    if kind == "landscape":
        around = found.get("around", {"grid": [], "models": []})
        planes = [(found["grid"], found["loss"])]
        planes += [(around["grid"], model["loss"]) for model in around["models"]]
        if any({len(grid), len(loss), len(loss[0])} != {len(grid)} for grid, loss in planes):
            return "a surface has not the size of its grid"
    if kind == "embedding":
        lists = (found["x"], found["y"], found["label"], found.get("client") or found["x"])
        if len({len(each) for each in lists}) > 1:
            return "its lists differ in length"
        if "classes" in found and max(found["label"]) >= len(found["classes"]):
            return "a label is of no class"
    if kind == "theory" and len(found["bound"]) != len(found["observed"]):
        return "its lists differ in length"
    if kind == "partition" and len(found["classes"]) != len(found["class_counts"][0]):
        return "its classes are not those of its counts"
    return None
