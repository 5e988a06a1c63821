"""The command line: a function per command, whose work is done elsewhere."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import click
import typer
from rich.console import Console
from rich.table import Table

from .errors import FedscError, unknown
from .files import write_atomically
from .options import options_of
from .progress import data_progress
from .spec import RunSpec, read_config

app = typer.Typer(
    help="Federated learning on non-IID data: FedSC and the methods it is compared with.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Data sets: fetch them, list them, see how clients share them.")
app.add_typer(data_app, name="data")
console = Console()

DATA_DIR = typer.Option(
    None, help="folder with the data sets (default: $FEDSC_DATA or ~/.cache/fedsc)"
)
PARTITION_OPTIONS = (
    "dataset",
    "partition",
    "clients",
    "long_tail",
    "train_limit",
    "few_shot",
    "seed",
)


def main() -> None:
    """Entry point: what the user did wrong is one line and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except click.exceptions.Abort:
        sys.exit(130)  # Ctrl-C
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except (FedscError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"fedsc: {text}", file=sys.stderr)
        sys.exit(2)


def options_from_spec(names: tuple[str, ...] | None = None) -> Any:
    """Give a command one option per field of RunSpec, with its help and its default.

    The command receives as keyword arguments what the user gave, and nothing else.
    """

    def decorate(command: Any) -> Any:
        own = list(inspect.signature(command).parameters.values())
        own = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {p.name for p in own}
        fields = [
            opt
            for opt in options_of(RunSpec)
            if opt.name not in taken and (names is None or opt.name in names)
        ]
        parameters = []
        for opt in fields:
            default = "" if opt.default is None else f" (default: {opt.default})"
            metavar = f"[{'|'.join(opt.choices)}]" if opt.choices else None
            flag = "--" + opt.name.replace("_", "-")
            if opt.kind is bool:
                flag += "/--no-" + opt.name.replace("_", "-")
            extra = typer.Option(None, flag, help=opt.help + default, metavar=metavar)
            parameters.append(
                inspect.Parameter(
                    opt.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=extra,
                    annotation=opt.kind | None,
                )
            )

        def wrapped(**given: Any) -> None:
            kept = {k: v for k, v in given.items() if k in taken or v is not None}
            command(**kept)

        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        signature = inspect.Signature(keyword_only + parameters)
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


def show_version(wanted: bool) -> None:
    if wanted:
        print(package_version("fedsc"))
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def run(
    method: list[str] | None = typer.Option(
        None,
        help="a method, with options if any: fedsc, fedsc,literal or fedsc,tau=0.1; "
        "give several to compare them (default: fedsc)",
    ),
    seed: list[int] | None = typer.Option(
        None, help="seed of everything random; give several for mean and spread (default: 0)"
    ),
    config: Path | None = typer.Option(
        None, help="TOML file with the options of a run; the command line wins over it"
    ),
    out: Path | None = typer.Option(
        None, help="folder for the results (default: runs/DATASET-PARTITION)"
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="delete all runs in --out first"),
    resume: Path | None = typer.Option(
        None, help="go on with the runs in this folder, as they were asked for"
    ),
    track: list[str] | None = typer.Option(
        None, help="also keep the runs in tensorboard or mlflow; may be given twice"
    ),
    data_dir: Path | None = DATA_DIR,
    quiet: bool = typer.Option(False, "--quiet", help="show the table only"),
    **given: Any,
) -> None:
    """Train federations, one per method and seed, and compare them in a table and a picture."""
    from .experiments.compare import Job, compare, read_job

    settings = {**(read_config(config) if config else {}), **given}
    methods = method or settings.pop("methods", None) or one(settings.pop("method", None))
    seeds = seed or settings.pop("seeds", None) or one(settings.pop("seed", None))
    for name in ("method", "methods", "seed", "seeds"):  # of the file, where the flags won
        settings.pop(name, None)
    if resume is None:
        job = Job(methods or ["fedsc"], seeds or [0], settings)
        compare(job, console, out, overwrite, False, data_dir, quiet, track)
        return
    if out is not None or overwrite:
        raise FedscError("--resume goes on in the folder it names: leave out --out and --overwrite")
    if methods:
        settings["methods"] = methods
    if seeds:
        settings["seeds"] = seeds
    compare(read_job(resume, settings), console, resume, False, True, data_dir, quiet, track)


def one(value: Any) -> list[Any] | None:
    return None if value is None else [value]


app.command("run")(options_from_spec()(run))


@app.command()
def methods(
    name: str | None = typer.Argument(None, help="one method only (default: all)"),
) -> None:
    """List the methods with their hyperparameters, defaults and what is allowed."""
    from .methods import METHODS, installed_methods, method_class

    for each in [name] if name else [*METHODS, *installed_methods()]:
        cls = method_class(each)
        summary = (sys.modules[cls.__module__].__doc__ or "").partition("\n")[0]
        table = Table(title=f"{each}: {summary}", title_justify="left", header_style="bold")
        for column in ("option", "default", "allowed", "what it is"):
            table.add_column(column, overflow="fold")
        for opt in options_of(cls):
            words = [opt.kind.__name__, opt.limits, "or none" if opt.optional else ""]
            allowed = ", ".join(opt.choices) or " ".join(filter(None, words))
            table.add_row(
                opt.name,
                str(opt.default).lower() if opt.default is None else str(opt.default),
                allowed,
                opt.help,
            )
        console.print(table)
        for preset, values in cls.presets.items():
            settings = ", ".join(f"{k}={v}" for k, v in values.items())
            console.print(f"  preset [bold]{each},{preset}[/bold]: {settings}")
        for dataset, values in cls.dataset_defaults.items():
            settings = ", ".join(f"{k}={v}" for k, v in values.items())
            console.print(f"  default on {dataset}: {settings}")
        console.print()


@data_app.command("list")
def data_list(data_dir: Path | None = DATA_DIR) -> None:
    """Say which data sets there are, and which are on this machine."""
    from .data.sources import SOURCES, default_data_dir

    folder = data_dir or default_data_dir()
    table = Table(title=f"Data sets in {folder}", title_justify="left", header_style="bold")
    for column in ("name", "what it is", "train", "test", "classes", "here"):
        table.add_column(column)
    for source in SOURCES.values():
        found = source.find(folder)
        here = "built in" if not source.layouts else "yes" if found else "no"
        sizes = source.num_train, source.num_test, source.num_classes
        table.add_row(source.name, source.description, *(f"{n:,}" for n in sizes), here)
    table.add_row("folder:PATH", "your images, a sub-folder per class", "", "", "", "")
    table.add_row("npz:PATH", "your arrays x_train, y_train, x_test, y_test", "", "", "", "")
    console.print(table)


@data_app.command("get")
def data_get(
    name: str = typer.Argument(help="data set, as `fedsc data list` calls it"),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Fetch a data set, check it and put it where runs find it."""
    from .data.fetch import fetch
    from .data.sources import default_data_dir

    with data_progress(console) as progress:
        folder = fetch(name, data_dir or default_data_dir(), progress)
    console.print(f"{name} is in {folder}", soft_wrap=True)


def data_show(
    png: Path | None = typer.Option(None, help="write the picture to this file as well"),
    data_dir: Path | None = DATA_DIR,
    **given: Any,
) -> None:
    """Draw how a partition deals the classes to the clients."""
    from .data.partition import class_count_table, fingerprint
    from .experiments.runner import load
    from .federation import split_training_data

    spec = RunSpec(**given)
    with data_progress(console) as progress:
        data = load(spec, data_dir, progress)
    parts = split_training_data(spec, data)
    counts = class_count_table(data.train_labels.numpy(), parts, data.num_classes)
    tail = f", long tail {spec.long_tail:g}" if spec.long_tail else ""
    title = f"{spec.dataset}, {spec.partition}{tail}, seed {spec.seed}"
    from .report.partition_table import partition_table

    console.print(partition_table(counts, data.classes, title, console.width))
    console.print(f"partition {fingerprint(parts)[:12]}, {counts.sum():,} images")
    if png is not None:
        from .report.pictures import draw_partition

        draw_partition(counts, data.classes, title, png)
        console.print(f"picture in {png}")


data_app.command("show")(options_from_spec(PARTITION_OPTIONS)(data_show))


BENCH_OPTIONS = (
    *("clients", "participation", "partition", "epochs", "batch_size", "norm"),
    *("device", "engine", "slots", "compile", "precision", "threads"),
)


def bench(
    method: list[str] | None = typer.Option(None, help="method (default: all)"),
    model: str | None = typer.Option(None, help="model (default: resnet10 on a GPU, else cnn)"),
    rounds: int = typer.Option(2, help="rounds to time, after a first one to warm up", min=1),
    images: int | None = typer.Option(
        None, help="random training images (default: 50,000 on a GPU, else 2,000)", min=100
    ),
    out: Path = typer.Option(Path("bench.json"), help="file for all the numbers"),
    **given: Any,
) -> None:
    """Measure how fast this machine trains, beside a plain DataLoader loop.

    On a CPU with one local epoch, unless --epochs says otherwise.
    """
    import torch

    from .experiments.bench import SHAPES, Measurement
    from .experiments.bench import bench as measure
    from .experiments.runner import number_of_threads
    from .files import check_place
    from .methods import METHODS, method_from_text

    gpu = torch.cuda.is_available() and given.get("device", "auto") != "cpu"
    model = model or ("resnet10" if gpu else "cnn")
    if model not in SHAPES:
        raise unknown("model", model, SHAPES)
    for text in method or []:  # before minutes of measuring
        method_from_text(text)
    check_place(out)
    if not gpu:
        given.setdefault("epochs", 1)
    rows: list[Measurement] = []

    def show(row: Measurement) -> None:
        rows.append(row)
        ratio = row.images_per_second / rows[0].images_per_second
        text = f"{row.name:24s}{row.images_per_second:>12,.0f} images/s{ratio:>9.2f} x plain"
        if row.training_images_per_second is not None:
            text += f"{row.training_images_per_second:>12,.0f} in training"
        text += f"{100 * (row.share_of_ceiling or 0):>8.1f} % of ceiling"
        if row.gpu_memory_gib is not None:
            text += f"{row.gpu_memory_gib:>8.1f} GiB"
        if row.start_up_seconds is not None:
            text += f"{row.start_up_seconds:>8.1f} s start-up"
        console.print(text, soft_wrap=True, highlight=False)

    size = images or (50_000 if gpu else 2_000)
    with number_of_threads(given.get("threads")):
        result = measure(model, method or list(METHODS), rounds, size, given, show)
    write_atomically(out, (json.dumps(result, indent=2) + "\n").encode())
    console.print(f"Ceiling {result['ceiling_tflops']:.1f} TFLOP/s; all numbers in {out}")


app.command("bench")(options_from_spec(BENCH_OPTIONS)(bench))


WHERE_COMPUTED = ("device", "engine", "slots", "compile", "client_memory", "threads")
SEEDS = typer.Option(1, help="number of seeds, for mean and spread: 0, 1, ...", min=1)
QUIET = typer.Option(False, "--quiet", help="show the tables only")


def reproduce(
    names: list[str] | None = typer.Argument(
        None, help="table1 to table5, figure1, figure5, figure6, figure7, or all; none: list them"
    ),
    scale: str = typer.Option(
        "paper", help="paper, small (real data, less of it) or smoke (a minute on a CPU)"
    ),
    columns: str | None = typer.Option(
        None, help="some of the columns: cifar10,cifar100 or cifar10/nid2 (default: all)"
    ),
    methods: str | None = typer.Option(None, help="some of the rows: fedavg,fedsc (default: all)"),
    seeds: int = SEEDS,
    out: Path | None = typer.Option(
        None, help="folder for runs and tables (default: runs/reproduce-SCALE)"
    ),
    data_dir: Path | None = DATA_DIR,
    quiet: bool = QUIET,
    **given: Any,
) -> None:
    """Run the paper's tables and figures; without a name, list them.

    What is finished already is not run again.
    """
    from .experiments.reproduce import list_grids
    from .experiments.reproduce import reproduce as run_grids

    if not names:
        list_grids(console)
        return
    kept = listed(columns), listed(methods)
    if not run_grids(names, scale, *kept, seeds, out, console, given, data_dir, quiet):
        raise typer.Exit(1)


def listed(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def sweep(
    values: list[str] = typer.Option(
        ..., "--set", help="an option of the run or the method and its values: tau=0.05,0.1"
    ),
    method: list[str] | None = typer.Option(
        None, help="a method, with options if any; give several to compare them (default: fedsc)"
    ),
    seeds: int = SEEDS,
    out: Path | None = typer.Option(
        None, help="folder for runs and tables (default: runs/sweep-DATASET-PARTITION)"
    ),
    data_dir: Path | None = DATA_DIR,
    quiet: bool = QUIET,
    **given: Any,
) -> None:
    """Run every combination of some options' values; what is finished is not run again."""
    from .experiments.reproduce import parse_values
    from .experiments.reproduce import sweep as run_sweep

    asked = method or ["fedsc"], parse_values(values)
    if not run_sweep(*asked, seeds, given, out, console, data_dir, quiet):
        raise typer.Exit(1)


@app.command()
def results(
    folders: list[Path] | None = typer.Argument(
        None, help="folders with runs, or those of reproduce and sweep"
    ),
    accuracy: float | None = typer.Option(
        None, help="accuracy in % whose cost in bytes and seconds is shown", min=0, max=100
    ),
    write: Path | None = typer.Option(None, help="write the tables to this .md, .tex or .csv"),
    fill: Path | None = typer.Option(
        None, help="make the marked tables of this .md page again; the page names the folders"
    ),
) -> None:
    """Show runs as tables, or the tables of a grid again, without running anything."""
    from .experiments.reproduce import results as show_results
    from .report.results_page import fill_page

    if fill is not None:
        if folders or write is not None or accuracy is not None:
            raise FedscError("--fill stands alone: the page itself names its folders")
        console.print(fill_page(fill), soft_wrap=True, highlight=False)
        return
    if not folders:
        raise FedscError("give folders with runs, or a page to --fill")
    show_results(folders, console, None if accuracy is None else accuracy / 100, write)


app.command("reproduce")(options_from_spec(WHERE_COMPUTED)(reproduce))
RUN_OPTIONS = tuple(opt.name for opt in options_of(RunSpec) if opt.name not in ("method", "seed"))
app.command("sweep")(options_from_spec(RUN_OPTIONS)(sweep))


RUNS = typer.Argument(help="run folders, or folders that hold some")


@app.command()
def report(
    runs: list[Path] = RUNS,
    out: Path = typer.Option(Path("report.html"), "--out", "-o", help="file for the page"),
) -> None:
    """Write one HTML page with all figures and tables of the runs; it opens offline.

    RUNS are run folders, or folders that hold some.
    """
    from rich.progress import track

    from .report.page import RunReader, write_report

    def watch(folders: Any) -> Any:
        hidden = not console.is_terminal
        return track(folders, "Reading runs", console=console, transient=True, disable=hidden)

    data = RunReader(runs).page_data(watch)
    say_skipped(data)
    if not data["runs"]:
        raise FedscError("there is no run to show: give folders that `fedsc run` has written")
    size = write_report(data, out)
    number = len(data["runs"])
    words = f"{number} run" if number == 1 else f"{number} runs"
    console.print(f"{words} in {out} ({size / 2**20:.1f} MiB)", soft_wrap=True)


@app.command()
def board(
    runs: list[Path] = RUNS,
    port: int = typer.Option(8642, help="port on 127.0.0.1; 0 takes any that is free"),
) -> None:
    """Serve the page of `fedsc report` on this machine, growing while runs go on.

    RUNS are run folders, or folders that hold some or will.
    """
    from .report.board import Board

    for path in runs:
        if not path.is_dir():
            raise FedscError(f"{path} is not a folder: give one that holds runs, or will")
    with Board(runs, port) as server:
        say_skipped(server.current())
        console.print(f"Board at {server.url} until Ctrl-C", soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def say_skipped(data: dict[str, Any]) -> None:
    for line in data["skipped"]:
        print(f"fedsc: {line}", file=sys.stderr)


@app.command()
def figure(
    kind: str = typer.Argument(
        help="curves, landscape, sensitivity, embedding, partition, classes or drift"
    ),
    runs: list[Path] = typer.Argument(help="run folders, or folders that hold some"),
    out: Path = typer.Option(..., "-o", "--out", help="the picture, .png or .pdf"),
    over: str | None = typer.Option(
        None, help="sensitivity: the hyperparameter, where the runs differ in several"
    ),
    title: str = typer.Option("", help="sensitivity: another title"),
    images: int | None = typer.Option(
        None, help="landscape, embedding: how many test images (default: 250, 1000)", min=5
    ),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Draw a figure from run folders, for a paper.

    Kinds: curves, landscape, sensitivity, embedding, partition, classes, drift.
    """
    from .experiments.figure import make_figure

    make_figure(kind, runs, out, console, over, title, images, data_dir)


@app.command()
def theory(
    run: Path = typer.Argument(help="folder of a finished run of fedsc"),
    xi: float | None = typer.Option(
        None, help="mean squared gradient to reach (default: that of the last checkpoint)"
    ),
    out: Path | None = typer.Option(None, "-o", "--out", help="draw loss and bound, .png or .pdf"),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Set the paper's theorems beside a run: estimated constants, conditions and bound."""
    from .analysis.verdict import theory_of
    from .report.pictures import check_picture
    from .report.runs import read_run
    from .report.theory_table import draw_theory, show_theory

    if xi is not None and not xi > 0:
        raise FedscError(f"--xi {xi:g} is out of range (allowed: above 0)")
    if out is not None:
        check_picture(out)
    data = read_run(run)
    with data_progress(console) as progress:
        found = theory_of(data, xi, data_dir, progress, progress)
    show_theory(data, found, console)
    if out is not None:
        draw_theory(data, found, out)
        console.print(f"picture in {out}", soft_wrap=True)


@app.command("export")
def export_model(
    run: Path = typer.Argument(help="run folder"),
    out: Path = typer.Option(Path("model"), help="folder for the files"),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Write a run's model for other programs: torch.export and ONNX, normalisation inside."""
    from .experiments.trained import export, has_onnx, load_trained

    trained = load_trained(run, data_dir)
    if not has_onnx():
        console.print("No ONNX file: for one, pip install 'fedsc[export]'", highlight=False)
    with console.status("exporting"):
        written = list(export(trained, out))
    console.print("Written: " + ", ".join(map(str, written)), soft_wrap=True, highlight=False)


@app.command("predict")
def predict(
    run: Path = typer.Argument(help="run folder"),
    paths: list[Path] = typer.Argument(help="images, folders of images, or .npz files with x"),
    by: str = typer.Option("classifier", help="classifier or prototype (the nearest by cosine)"),
    top: int = typer.Option(1, help="classes to show for each image", min=1),
    csv: Path | None = typer.Option(None, help="write all probabilities to this file as well"),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Classify new images with the model of a run."""
    from .experiments.trained import load_trained, probabilities_as_csv, read_images

    if by not in ("classifier", "prototype"):
        raise unknown("value for --by", by, ("classifier", "prototype"))
    trained = load_trained(run, data_dir)
    names, images = read_images(paths, trained.image_shape)
    probabilities = trained.probabilities(images, by)  # type: ignore[arg-type]
    if csv is not None:
        write_atomically(csv, probabilities_as_csv(names, trained.classes, probabilities).encode())
    best = probabilities.topk(min(top, len(trained.classes)), dim=1)
    for name, values, labels in zip(names, *best, strict=True):
        found = (f"{trained.classes[j]} {p:.1%}" for p, j in zip(values, labels, strict=True))
        console.print(f"{name}: {', '.join(found)}", soft_wrap=True, highlight=False, markup=False)


flower_app = typer.Typer(help="The same methods across machines, on Flower.")
app.add_typer(flower_app, name="flower")


@flower_app.callback(invoke_without_command=True)
def flower(context: typer.Context) -> None:
    """The same methods across machines, on Flower (docs/deploy.md)."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FedscError("Flower is not installed; run: pip install 'fedsc[flower]'") from None
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@flower_app.command("setup")
def flower_setup(
    folder: Path = typer.Argument(help="new folder for everything"),
    nodes: int = typer.Option(3, help="number of nodes", min=1),
    address: str = typer.Option("localhost:9092", help="HOST:PORT at which nodes find the server"),
) -> None:
    """Write all that a federation needs: app, TLS certificates, node keys, start scripts."""
    from .flower.setup import write_federation

    commands = write_federation(folder, nodes, address)
    console.print("Type, each in a terminal of its own:")
    for number, command in enumerate(commands, 1):
        console.print(f"  {number}. {command}", soft_wrap=True, highlight=False)


@flower_app.command("app")
def flower_application(folder: Path = typer.Argument(help="folder for the app")) -> None:
    """Write the Flower app, for a SuperLink that runs already."""
    from .flower.setup import try_command, write_app

    write_app(folder)
    console.print(f"The app is in {folder}; to run it on this machine:", soft_wrap=True)
    console.print(try_command(folder), soft_wrap=True, highlight=False, markup=False)
