"""Run folders as one HTML page: `fedsc report` writes it, `fedsc board` serves it.

Python reads the runs, computes what is said about seeds and fills JSON into the files of `page/`;
they draw it with Plotly. Nothing is fetched when the page is opened.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import FedscError
from ..files import read_json, write_atomically
from ..spec import NOT_PART_OF_THE_HASH
from .checks import FILES, check_file
from .colours import COLOURS, COLOURS_ON_DARK
from .results_table import method_of
from .runs import RunData, find_folders, read_run, setting_of, without_copies
from .statistics import (
    ACCURACY_LEVELS,
    bytes_to,
    mean_and_spread,
    paired_p_value,
    rounds_to,
    seconds_to,
)

ASSETS = Path(__file__).with_name("page")
SCRIPTS = ("choices.js", "figures.js", "panels.js", "table.js", "main.js")  # in this order
MOST_CLASS_ROUNDS = 25  # rounds for which accuracy by class is kept, the last one among them

# What the records hold, by name: title, unit, and what it is. What a method of one's own records
# beside it is shown under its own name.
METRICS = {
    "accuracy": (
        "Test accuracy",
        "%",
        "Share of test images that the global model gets right.",
    ),
    "accuracy_ci95": ("Accuracy, 95% interval", "%", "Half the interval over few-shot episodes."),
    "client_worst": (
        "Worst client",
        "%",
        "Test accuracy weighted to the class shares of the client that fares worst.",
    ),
    "client_mean": ("Mean over clients", "%", "Test accuracy weighted to each client's classes."),
    "nearest_prototype": (
        "Nearest prototype",
        "%",
        "Accuracy when the nearest class prototype decides instead of the classifier.",
    ),
    "calibrated": (
        "With calibration",
        "%",
        "Accuracy when the linear discriminant of fedsc+ decides instead of the classifier.",
    ),
    "summed": (
        "By the sum of classifiers",
        "%",
        "Accuracy when the sum of that discriminant and the classifier decides, as in fedsc+.",
    ),
    "head": ("Head classes", "%", "Mean accuracy of the largest third of the classes."),
    "middle": ("Middle classes", "%", "Mean accuracy of the middle third of the classes."),
    "tail": ("Tail classes", "%", "Mean accuracy of the smallest third of the classes."),
    "ece": ("Calibration error (ECE)", "%", "Gap between confidence and accuracy; less is better."),
    "train_loss": ("Training loss", "", "All terms of the clients' loss, averaged by samples."),
    "prototype_drift": (
        "Prototype drift",
        "",
        "Mean change of the consistent prototypes in a round, relative to their length.",
    ),
    "prototype_rows": ("Prototype rows", "", "Relational prototypes that the server holds."),
    "prototypes_bounded": (
        "Prototypes bounded",
        "",
        "Clients' prototypes that robust_prototypes shortened or pulled in.",
    ),
    "min_u": (
        "Smallest U",
        "",
        "Of Eq. 13; it divides the cosines of the relational loss.",
    ),
    "bytes_up": ("Upload", "MB", "All that the clients of a round send to the server."),
    "bytes_down": ("Download", "MB", "All that the server sends to the clients of a round."),
    "timing.seconds": ("Time of a round", "s", "Depends on the machine."),
    "timing.fit_seconds": ("Time of training", "s", "Depends on the machine."),
    "timing.aggregate_seconds": ("Time of aggregation", "s", "Depends on the machine."),
    "timing.evaluate_seconds": ("Time of evaluation", "s", "Depends on the machine."),
    "timing.images_per_second": ("Images per second", "", "Trained on; depends on the machine."),
}
NO_METRIC = ("round", "cohort", "per_class", "diverged", "dropped", "late", "rejected")
LESS_IS_BETTER = ("ece", "train_loss", "timing", "bytes", "prototype_drift")

# Facts of a specification that are no option of the run.
NO_OPTION = {
    *("format", "hash", "code", "data_checksum", "partition_hash", "seed", "method", "dataset"),
    *NOT_PART_OF_THE_HASH,
}
IN_A_SETTING = {  # said by setting_of
    *("partition", "long_tail", "few_shot", "clients", "participation", "epochs", "model"),
    *("dropout", "straggler"),
    *("attack", "attackers"),
}
# Files that other commands leave in a run folder, and what the page cannot do without.
EXTRAS = {
    "landscape": ("grid", "loss"),
    "embedding": ("x", "y", "label"),
    "theory": ("bound", "observed"),
}

Json = dict[str, Any]
Stamp = list[tuple[int, int] | None]  # time and size of each file, None if it is not there
Watch = Callable[[Iterable[Path]], Iterable[Path]]  # shows progress over folders


class RunReader:
    """Reads run folders, and reads again only those whose files have changed."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._known: dict[Path, tuple[Stamp, tuple[RunData, Json] | FedscError]] = {}
        self._files: Any = None
        self._state: Any = None
        self._data: Json = {}

    def page_data(self, watch: Watch = iter) -> Json:
        """All that the page shows; folders that cannot be read are named under `skipped`."""
        folders, skipped = find_folders(self.paths)
        stamps = {folder: _stamp(folder) for folder in folders}
        if self._files != (stamps, skipped):
            known = self._known
            self._known = {
                folder: known[folder]
                if folder in known and known[folder][0] == stamps[folder]
                else (stamps[folder], _read(folder))
                for folder in watch(folders)
            }
            self._files = stamps, skipped
        found = [content for _, content in self._known.values()]
        read = [content for content in found if not isinstance(content, FedscError)]
        stopped = [run.path for run, _ in read if run.seems_stopped()]  # no file says so
        if self._state != (*self._files, stopped):
            self._state = (*self._files, stopped)
            errors = [str(content) for content in found if isinstance(content, FedscError)]
            self._data = _page_data(read, stopped, [*skipped, *errors])
        return self._data

    @property
    def stamp(self) -> str:
        """Another whenever page_data has found something new."""
        return hashlib.sha256(repr(self._state).encode()).hexdigest()[:16]


def write_report(data: Json, path: Path) -> int:
    """Write the page; returns its size in bytes."""
    if path.is_dir():
        raise FedscError(f"cannot write {path}: it is a folder; give a file such as report.html")
    content = render(data).encode()
    write_atomically(path, content)
    return len(content)


def render(data: Json, poll: bool = False) -> str:
    """The page as text. With `poll` it asks the server that it came from for newer data."""
    scripts = {
        "theme": read_asset("theme.js"),
        "plotly": plotly_script(),
        "code": "\n".join(map(read_asset, SCRIPTS)),
    }
    allowed = " ".join(f"'sha256-{_sha256(text)}'" for text in scripts.values())
    connect = "'self'" if poll else "'none'"
    policy = (  # only these three scripts run, whatever else finds its way into the page
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    filled = {
        "policy": policy,
        "style": read_asset("style.css"),
        "data": as_script_text({**data, "poll": poll}),
        **scripts,
    }
    # Parts between the marks, so that nothing in the data is taken for a mark.
    parts = read_asset("page.html").split("%%")
    return "".join(filled[part] if i % 2 else part for i, part in enumerate(parts))


def as_script_text(value: Json) -> str:
    """JSON that is safe inside a script element: no character of it can end the element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plotly_script() -> str:
    """Plotly for the browser, as its Python package brings it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise FedscError("the page is drawn by Plotly: pip install 'fedsc[report]'") from None
    return str(get_plotlyjs())


def read_asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# One run ------------------------------------------------------------------------------------------


def _stamp(folder: Path) -> Stamp:
    """Changes whenever a file changes that the page is made from."""
    names = "spec.json", "metrics.jsonl", "summary.json", "partition.json"
    stats: Stamp = []
    for name in (*names, *(f"{extra}.json" for extra in EXTRAS)):
        try:
            stat = (folder / name).stat()
            stats.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            stats.append(None)
    return stats


def _read(folder: Path) -> tuple[RunData, Json] | FedscError:
    try:
        run = read_run(folder)
        return run, _run_data(run)
    except FedscError as error:
        return error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        return FedscError(f"{folder} is damaged: {what}")


def _run_data(run: RunData) -> Json:
    """A run as the page gets it."""
    spec, records = run.spec, run.records
    flat = [
        {"accuracy": _short(record["accuracy"]), **dict(_numbers(record))} for record in records
    ]
    names = dict.fromkeys(name for record in flat for name in record)
    notes: list[str] = []
    partition, note = _read_extra(run.path, "partition", ("classes", "class_counts"))
    extras: Json = {}
    notes += [note] if note else []
    for name, needed in EXTRAS.items():
        extras[name], note = _read_extra(run.path, name, needed)
        notes += [note] if note else []
    return {
        "path": str(run.path),
        "label": run.label,
        "name": str(spec["method"]["name"]),
        "dataset": str(spec["dataset"]),
        "setting": setting_of(spec),
        "seed": int(spec["seed"]),
        "rounds": int(spec["rounds"]),
        "complete": run.complete,
        "diverged": any(record.get("diverged") for record in records),
        "round": [int(record["round"]) for record in records],
        "series": {name: [record.get(name) for record in flat] for name in names},
        "per_class": _per_class(records),
        "partition": partition,
        "notes": notes,
        **{name: value for name, value in extras.items() if value is not None},
    }


def _numbers(record: Json) -> Iterator[tuple[str, float | None]]:
    """The measurements of a round by name; terms of the loss and times as `train_loss.ce`."""
    for name, value in record.items():
        if name in NO_METRIC:
            continue
        if isinstance(value, dict):
            terms = {f"{name}.{inner}": _short(number) for inner, number in value.items()}
            if name == "train_loss":
                numbers = [number for number in terms.values() if number is not None]
                whole = numbers and len(numbers) == len(terms)  # else nobody trained, or diverged
                yield name, _short(sum(numbers)) if whole else None
            yield from terms.items()
        elif value is None or isinstance(value, int | float):
            yield name, _short(value)


def _per_class(records: list[Json]) -> Json | None:
    there = [record for record in records if isinstance(record.get("per_class"), list)]
    if not there:
        return None
    step = math.ceil(len(there) / MOST_CLASS_ROUNDS)
    kept = there[::-1][::step][::-1]  # counted from the end, which is kept
    return {
        "round": [record["round"] for record in kept],
        "values": [[_short(value, 3) for value in record["per_class"]] for record in kept],
    }


def _read_extra(folder: Path, name: str, needed: tuple[str, ...]) -> tuple[Json | None, str | None]:
    """A JSON file of the run folder if it is there, or a line that says what is wrong with it."""
    path = folder / f"{name}.json"
    try:
        found = read_json(path)
        check_file(name, found, tuple(key for key in FILES[name] if key not in needed))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{path} is damaged and not shown: {error}"
    return _shortened(found), None


def _short(value: float | None, digits: int = 5) -> float | None:
    """With as many digits as a picture can show; what is no number is null."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    return _short(value) if isinstance(value, float) else value


# All runs together --------------------------------------------------------------------------------


def _page_data(read: list[tuple[RunData, Json]], stopped: list[Path], skipped: list[str]) -> Json:
    counted, copies = without_copies([run for run, _ in read])
    folders = {run.path for run in counted}
    read = [(run, found) for run, found in read if run.path in folders]
    partitions: dict[str, Json] = {}
    runs: list[Json] = []
    for (run, found), method in zip(read, _method_labels([run for run, _ in read]), strict=True):
        state = "finished" if run.complete else "stopped" if run.path in stopped else "running"
        skipped = [*skipped, *found["notes"]]
        table = found["partition"]
        if table is not None:
            partitions.setdefault(str(table.get("hash")), table)
        shown = {key: value for key, value in found.items() if key != "notes"}
        shown |= {"method": method, "state": state}
        runs.append({**shown, "partition": table and str(table.get("hash"))})
    for run_data, options in zip(runs, _varying_options([run for run, _ in read]), strict=True):
        run_data["options"] = options
    groups = _groups([run for run, _ in read], runs)
    return {
        "version": version("fedsc"),
        "colours": {"light": COLOURS, "dark": COLOURS_ON_DARK},
        "levels": ACCURACY_LEVELS,
        "metrics": _metrics(runs),
        "methods": sorted({run["method"] for run in runs}, key=_numbers_by_size),
        "partitions": partitions,
        "runs": runs,
        "groups": groups,
        "skipped": [*skipped, *copies],
    }


def _method_labels(runs: list[RunData]) -> list[str]:
    """The methods as the user wrote them, or, where one text has meant two things, by what is not
    the default today; where runs of one name and setting differ in other options, with those."""
    recorded: dict[str, list[Json]] = {}
    for run in runs:
        recorded.setdefault(run.label, []).append(run.spec["method"])
    names = [run.label if all_alike(recorded[run.label]) else method_of(run) for run in runs]
    values: dict[Any, dict[str, set[str]]] = {}
    settings = [(run.spec["dataset"], setting_of(run.spec)) for run in runs]
    keys = [(*setting, name) for setting, name in zip(settings, names, strict=True)]
    for key, run in zip(keys, runs, strict=True):
        seen = values.setdefault(key, {})
        for name in run.spec.keys() - NO_OPTION - IN_A_SETTING:
            seen.setdefault(name, set()).add(json.dumps(run.spec[name]))
    labels = []
    for key, run in zip(keys, runs, strict=True):
        differ = sorted(name for name, found in values[key].items() if len(found) > 1)
        labels.append(", ".join([key[-1], *(f"{name} {run.spec.get(name)}" for name in differ)]))
    return labels


def all_alike(methods: list[Json]) -> bool:
    """In the options that both of two name: an older run lacks the newer ones."""
    first = methods[0]
    return all(first.get(name, value) == value for one in methods for name, value in one.items())


def _varying_options(runs: list[RunData]) -> list[Json]:
    """For each run, the options that take several values among the runs of its method."""
    found = [_options(run.spec) for run in runs]
    keys = [(run.spec["dataset"], run.spec["method"]["name"]) for run in runs]
    values: dict[Any, set[str]] = {}
    for key, options in zip(keys, found, strict=True):
        for name, value in options.items():
            values.setdefault((key, name), set()).add(json.dumps(value))
    return [
        {name: value for name, value in options.items() if len(values[key, name]) > 1}
        for key, options in zip(keys, found, strict=True)
    ]


def _options(spec: Json) -> Json:
    """Options of the run and of its method; a partition as its kind and its parameter."""
    kind, _, parameter = str(spec["partition"]).partition(":")
    options = {k: v for k, v in spec.items() if k not in NO_OPTION}
    with contextlib.suppress(ValueError):  # it has none, or several
        options |= {f"{kind} parameter": float(parameter), "partition": kind}
    return {**options, **{k: v for k, v in spec["method"].items() if k != "name"}}


def _numbers_by_size(text: str) -> list[tuple[float, str]]:
    """Sorts tau=2 before tau=10."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]


def _metrics(runs: list[Json]) -> list[Json]:
    """The metrics that any run has, in the order of METRICS; a term of the loss follows the loss,
    and what only a method of one's own knows stands before bytes and times."""
    there = dict.fromkeys(name for run in runs for name in run["series"])
    order = list(METRICS)

    def place(name: str) -> tuple[int, bool]:
        known = next((n for n in (name, name.split(".")[0]) if n in METRICS), "bytes_up")
        return order.index(known), name in METRICS and known == "bytes_up"

    shown = []
    for name in sorted(there, key=place):
        plain = name.replace("train_loss.", "training loss: ").replace("_", " ")
        title, unit, what = METRICS.get(name, (plain[:1].upper() + plain[1:], "", ""))
        less = name.startswith(LESS_IS_BETTER)
        shown.append({"name": name, "title": title, "unit": unit, "what": what, "less": less})
    return shown


def _groups(runs: list[RunData], shown: list[Json]) -> list[Json]:
    """What is said of the runs that differ in their seed only.

    Finished runs are what counts; where none is finished, those that are not.
    """
    members: dict[tuple[str, str, str], list[int]] = {}
    for i, run in enumerate(shown):
        members.setdefault((run["dataset"], run["setting"], run["method"]), []).append(i)
    counted = {
        key: [i for i in indices if runs[i].complete] or indices for key, indices in members.items()
    }
    groups = [
        {
            "dataset": dataset,
            "setting": setting,
            "method": method,
            "runs": members[dataset, setting, method],
            "counted": indices,
            **_statistics([runs[i] for i in indices]),
            "final": _final([shown[i]["series"] for i in indices]),
            "p_values": {},
        }
        for (dataset, setting, method), indices in counted.items()
    ]
    for one, other in itertools.combinations(groups, 2):
        if (one["dataset"], one["setting"]) == (other["dataset"], other["setting"]):
            pair = [_measured([runs[i] for i in group["counted"]]) for group in (one, other)]
            p = paired_p_value(*pair)
            if p is not None:
                one["p_values"][other["method"]] = other["p_values"][one["method"]] = p
    return groups


def _measured(runs: list[RunData]) -> list[RunData]:
    return [run for run in runs if run.measured]


def _statistics(runs: list[RunData]) -> Json:
    runs = _measured(runs)
    if not runs:
        return {"accuracy": {}, "reached": {}}
    summaries = [run.summary for run in runs]
    reached: Json = {}
    for level in ACCURACY_LEVELS:
        there = [run for run in runs if rounds_to(run, level) is not None]
        if there:
            reached[str(level)] = {
                "seeds": len(there),
                "of": len(runs),
                "rounds": _mean(rounds_to(run, level) for run in there),
                "bytes": _mean(bytes_to(run, level) for run in there),
                "seconds": _mean(seconds_to(run, level) for run in there),
            }
    return {
        "accuracy": {
            name: mean_and_spread([summary[name] for summary in summaries])
            for name in ("last", "best", "mean_last_10")
        },
        "reached": reached,
    }


def _mean(values: Iterable[float | None]) -> float:
    return mean_and_spread([value for value in values if value is not None])[0]


def _final(series: list[dict[str, list[float | None]]]) -> Json:
    """Mean and spread of each metric in the last round; missing if any run lacks it."""
    found: Json = {}
    for name in series[0]:
        values = [one[name][-1] for one in series if name in one]
        numbers = [value for value in values if value is not None]
        if len(numbers) == len(series):
            found[name] = mean_and_spread(numbers)
    return found
