"""Command line: `python -m examples.two_tower train` and `... compare`."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.two_tower.config import read_config
from examples.two_tower.data import DataError, Dataset, find_ratings, read_ratings, split_by_time
from examples.two_tower.devices import use_host_devices
from examples.two_tower.interrupt import interruptible, on_interrupt
from examples.two_tower.report import NoFolder, ReportError, RunFolder
from examples.two_tower.settings import SCHEDULES, Schedule, Settings, SettingsError
from examples.two_tower.synthetic import SyntheticStream

if TYPE_CHECKING:
    from examples.two_tower.train import Result

INTERRUPTED = 130
WORDS = {"staleness1": "staleness 1", "staleness0": "staleness 0", "plain": "plain JAX"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False)
DEFAULTS = Settings()


@dataclasses.dataclass(frozen=True)
class Job:
    """Which of how many processes this is. All do the same; the first one shows it and writes it down."""

    process: int = 0
    processes: int = 1
    devices: int | None = None  # in each process


job = Job()

Epochs = Annotated[int, typer.Option(help="Passes over the training data.")]
BatchSize = Annotated[int, typer.Option("--batch", help="Examples in a step, over all devices.")]
Width = Annotated[int, typer.Option(help="Width of an embedding row.")]
Seed = Annotated[int, typer.Option(help="Seed of the first values and of the order of the examples.")]
Data = Annotated[
    Path | None, typer.Option(help="A MovieLens folder or ratings file. Default: MovieLens-100K of recbole.")
]
Synthetic = Annotated[int | None, typer.Option(help="Instead of ratings, generate this many examples.")]
Devices = Annotated[int, typer.Option(help="Host devices to split tables and batches over.")]
Dtype = Annotated[str, typer.Option(help="Of the tables: float32, bfloat16 or float16.")]
Out = Annotated[Path, typer.Option(help="Folder of the runs.")]


def _take_config(context: typer.Context, path: Path | None) -> Path | None:
    """Makes what a run has written down the defaults of the options."""
    if path is not None:
        try:
            config = read_config(path)
        except SettingsError as error:
            _fail(str(error))
        context.obj = config.settings
        context.default_map = config.as_options()
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG.TOML",
        is_eager=True,
        callback=_take_config,
        help="Settings and data of an earlier run, from its config.toml; other options win over it.",
    ),
]
Name = Annotated[str | None, typer.Option(help="Folder of this run inside --out. Default: data, schedule and time.")]


@app.command()
def train(
    context: typer.Context,
    config: ConfigFile = None,
    name: Name = None,
    staleness: Annotated[int, typer.Option(min=0, max=1, help="1: updates overlap the next step. 0: exact.")] = 1,
    plain: Annotated[bool, typer.Option("--plain", help="Train the plain JAX peer instead.")] = False,
    epochs: Epochs = DEFAULTS.epochs,
    batch: BatchSize = DEFAULTS.batch,
    width: Width = DEFAULTS.width,
    seed: Seed = DEFAULTS.seed,
    data: Data = None,
    synthetic: Synthetic = None,
    devices: Devices = DEFAULTS.devices,
    dtype: Dtype = DEFAULTS.dtype,
    out: Out = Path("runs"),
) -> None:
    """Train one model; write metrics.csv, config.toml and metrics.png."""
    schedule: Schedule = "plain" if plain else "staleness1" if staleness == 1 else "staleness0"
    base = context.obj or DEFAULTS
    settings, dataset, source = _prepare(base, schedule, epochs, batch, width, seed, data, synthetic, devices, dtype)
    name = name or f"{dataset.name}-{schedule}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, result = _run(settings, dataset, source, out, name)
    console.print(f"[bold]test AUC[/]      {result.test_auc:.4f}")
    console.print(f"[bold]examples/s[/]    {result.examples_per_second:,.0f}")
    console.print(f"[bold]exposed time[/]  {_exposed(result)}")
    console.print(f"[bold]files[/]         {folder.path}/: metrics.csv, config.toml, metrics.png", soft_wrap=True)


@app.command()
def compare(
    name: Name = None,
    epochs: Epochs = DEFAULTS.epochs,
    batch: BatchSize = DEFAULTS.batch,
    width: Width = DEFAULTS.width,
    seed: Seed = DEFAULTS.seed,
    data: Data = None,
    synthetic: Synthetic = None,
    devices: Devices = DEFAULTS.devices,
    dtype: Dtype = DEFAULTS.dtype,
    out: Out = Path("runs"),
) -> None:
    """Train with staleness 1, staleness 0 and plain JAX from the same seed, and show the three side by side."""
    if job.processes > 1:
        _fail("compare trains in one process only; use train")
    settings, dataset, source = _prepare(
        DEFAULTS, "staleness1", epochs, batch, width, seed, data, synthetic, devices, dtype
    )
    name = name or f"{dataset.name}-compare-{time.strftime('%Y%m%d-%H%M%S')}"
    results: dict[Schedule, Result] = {}
    for schedule in SCHEDULES:
        # The peer stays in float32: it is what the tables of any dtype are measured against.
        own = dataclasses.replace(settings, schedule=schedule, dtype="float32" if schedule == "plain" else dtype)
        _, results[schedule] = _run(own, dataset, source, out, f"{name}-{schedule}")
    table = Table("schedule", "test AUC", "against plain", "examples/s", "exposed time", title=dataset.name)
    for schedule, result in results.items():
        difference = f"{result.test_auc - results['plain'].test_auc:+.4f}" if schedule != "plain" else ""
        speed = f"{result.examples_per_second:,.0f}"
        table.add_row(WORDS[schedule], f"{result.test_auc:.4f}", difference, speed, _exposed(result))
    console.print(table)
    console.print(f"files in {out}/{name}-*", soft_wrap=True)


def join_job(devices: int) -> None:
    """Makes this process one of the job that its launcher's variables tell of, with `devices` host devices of its own.
    Comes before everything else."""
    global job
    use_host_devices(devices)
    from jax_bridge.errors import ContextError
    from jax_bridge.processes import starting

    try:
        joined = starting.initialize()
    except ContextError as error:
        _exit_with(str(error))
    job = Job(joined.process_id, joined.num_processes, devices)
    console.quiet = job.process > 0


def _prepare(
    base: Settings,
    schedule: Schedule,
    epochs: int,
    batch: int,
    width: int,
    seed: int,
    data: Path | None,
    synthetic: int | None,
    devices: int,
    dtype: str,
) -> tuple[Settings, Dataset, dict[str, str | int]]:
    """Checks the options, sets the host devices up, and reads the data; nothing is written yet. `base` has what no
    option says. The last result is where the data came from."""
    if job.devices is not None:
        devices = job.processes * job.devices
    try:
        if job.processes > 1 and schedule == "plain":
            raise SettingsError("the plain JAX peer trains in one process only")
        settings = dataclasses.replace(
            base, schedule=schedule, epochs=epochs, batch=batch, width=width, seed=seed, devices=devices, dtype=dtype
        )
        if data is not None and synthetic is not None:
            raise SettingsError("--data and --synthetic exclude each other; give one")
        if job.devices is None:
            use_host_devices(devices)
        with on_interrupt(_leave_before_training):
            dataset: Dataset
            source: dict[str, str | int]
            if synthetic is not None:
                dataset, source = SyntheticStream(synthetic, seed, settings.test_fraction), {"synthetic": synthetic}
            else:
                file = find_ratings(data)
                dataset, source = (
                    split_by_time(read_ratings(file), settings.test_fraction),
                    {"file": str(file.resolve())},
                )
            # JAX takes seconds to import, and reads the flags set above.
            importlib.import_module("examples.two_tower.train")
    except (DataError, SettingsError) as error:
        _fail(str(error))
    console.print(
        f"{dataset.name}: {dataset.train_size:,} training and {len(dataset.test):,} test examples, "
        f"{dataset.user_rows:,} users, {dataset.item_rows:,} items"
    )
    return settings, dataset, source


def _run(
    settings: Settings, dataset: Dataset, source: dict[str, str | int], out: Path, name: str
) -> tuple[RunFolder, Result]:
    from examples.two_tower.train import describe, train

    try:
        make_folder = RunFolder if job.process == 0 else NoFolder
        folder = make_folder(out, name, describe(settings, dataset, name, source))
    except ReportError as error:
        _fail(str(error))
    stop = threading.Event()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console, disable=job.process > 0) as progress:
        task = progress.add_task(WORDS[settings.schedule], total=None, numbers="compiling")

        def watch(step: int, total: int, loss: float | None, test_auc: float | None) -> None:
            numbers = [
                f"{word} {value:.4f}" for word, value in (("loss", loss), ("AUC", test_auc)) if value is not None
            ]
            progress.update(task, completed=step, total=total, numbers="  ".join(numbers))

        def work() -> Result:
            result = train(settings, dataset, folder, watch, stop)
            progress.update(task, numbers=f"AUC {result.test_auc:.4f}")
            folder.plot(f"Two towers on {dataset.name}, {WORDS[settings.schedule]}, {_devices(settings)}")
            return result

        try:
            return folder, interruptible(work, stop)
        except KeyboardInterrupt:
            progress.stop()
            console.print(f"interrupted; the metrics up to here are in {folder.csv}", soft_wrap=True)
    _leave()


def _devices(settings: Settings) -> str:
    several = f"{job.processes} processes × {job.devices} devices"
    return several if job.processes > 1 else f"{settings.devices} devices"


def _exposed(result: Result) -> str:
    if result.exposed_seconds is None:
        return "not measured"
    share = f"{100.0 * result.exposed_seconds / result.seconds:.1f} % of {result.seconds:.1f} s"
    return f"{result.exposed_seconds:.3f} s, {1000.0 * result.exposed_seconds / result.steps:.3f} ms a step ({share})"


def _leave_before_training() -> None:
    console.print("\ninterrupted before training began; nothing was written")
    _leave()


def _leave() -> NoReturn:
    """Ends the process at once: a compilation or a step still in flight would hold an orderly end up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _fail(message: str) -> NoReturn:
    _print_error(message)
    raise typer.Exit(2)


def _exit_with(message: str) -> NoReturn:
    _print_error(message)
    sys.exit(2)


def _print_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escape(message)}", soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


if __name__ == "__main__":
    app()
