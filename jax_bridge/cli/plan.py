"""`async-emb plan`: what a job will need and how long its embeddings take, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .job_report import JobFile, end_with_findings, read_document
from .output import console, fail, print_json

if TYPE_CHECKING:
    from ..jobs.checking import CheckedJob
    from ..jobs.memory import TableMemory
    from ..jobs.prediction import Machine, Prediction

_BAR = 44
_ROWS_ARE_NOT_BUILT = "Row sharding is not built yet: what is said of rows is what it would take."


def _in(unit: str, least: float = 0.0, most: float = 1e9) -> Any:
    """An option for a number of these units. An infinite one has no place in a picture, nor in JSON."""

    def checked(value: float) -> float:
        if not least <= value <= most:
            raise typer.BadParameter(f"{value:g} is not a number between {least:g} and {most:g}")
        return value

    return typer.Option(help=unit, callback=checked)


def plan(
    job: JobFile,
    bandwidth: Annotated[float, _in("Of the link of a process, in GB/s.", least=1e-6)] = 12.5,
    latency: Annotated[float, _in("Of a message between processes, in microseconds.")] = 20.0,
    memory_bandwidth: Annotated[float, _in("Of the memory of a process, in GB/s.", least=1e-6)] = 20.0,
    dense: Annotated[float, _in("Forward and backward of a step, in milliseconds.")] = 10.0,
    forward_share: Annotated[float, _in("How much of that is the forward.", most=1.0)] = 1 / 3,
    unique_share: Annotated[float, _in("Distinct ids among a batch's tokens.", most=1.0)] = 1.0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PNG", help="Draw it into this file, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Predict memory by rank, bytes sent, embedding time and exposed time of a job, by columns and by rows."""
    from ..jobs.checking import check_job
    from ..jobs.memory import memory_of
    from ..jobs.prediction import Machine, predict

    if plot is not None and plot.suffix != ".png":  # a job file, for one, must not be drawn over
        fail(f"--plot {plot}: a picture is written as PNG, so its name must end in .png")
    checked = check_job(read_document(job, json=json))
    if checked.findings:
        end_with_findings(checked, json=json)
    machine = Machine(
        bandwidth=bandwidth * 1e9,
        latency=latency * 1e-6,
        memory_bandwidth=memory_bandwidth * 1e9,
        dense_seconds=dense * 1e-3,
        forward_share=forward_share,
        unique_share=unique_share,
    )
    memory, predictions = memory_of(checked), predict(checked, machine)
    if plot is not None:
        _plot(plot, checked, memory, predictions, machine)
    if json:
        print_json(_as_data(checked, memory, predictions, machine))
    else:
        _show_memory(memory)
        _show_times(checked, predictions, machine)


def _show_memory(memory: list[TableMemory]) -> None:
    from ..jobs.corrections import readable_bytes as size

    out = console()
    total = [sum(parts) for parts in zip(*(_parts(table) for table in memory), strict=True)]
    lines: list[tuple[str, ...]] = [("table", "weights", "state", "arena", "each rank")]
    for name, parts in [
        *((table.name, _parts(table)) for table in memory),
        *([("all", total)] if len(memory) > 1 else []),
    ]:
        lines.append((name, *(size(part) for part in parts), size(sum(parts))))
    out.print("Memory of a rank (the one that has most)", style="bold")
    _print_table(lines)
    out.print()
    largest = max(sum(_parts(table)) for table in memory)
    width = max(len(table.name) for table in memory)
    for table in memory:
        cells = [round(_BAR * part / largest) for part in _parts(table)]
        out.print(f"  {table.name:{width}} {'█' * cells[0]}{'▓' * cells[1]}{'░' * cells[2]}")
    out.print(f"  {'':{width}} █ weights  ▓ optimizer state  ░ arena of the context (CPU)")
    out.print()


def _show_times(checked: CheckedJob, predictions: list[Prediction], machine: Machine) -> None:
    from ..jobs.prediction import NOTHING, choice

    out = console()
    staleness = checked.job.staleness
    lines: list[tuple[str, ...]] = [("table", "layout", "MB sent", "lookup ms", "update ms", "exposed ms")]
    for layout in ("columns", "rows"):
        total = NOTHING
        for prediction in predictions:
            cost = getattr(prediction, layout)
            total += cost
            lines.append((prediction.name, layout, *_figures(cost)))
        exposed = total.exposed_seconds(machine, staleness)
        lines.append(("all", layout, *_figures(total)[:-1], f"{exposed * 1e3:.3f}"))
    out.print("A step, on the process that sends most (a model, not a measurement)", style="bold")
    _print_table(lines)
    out.print()
    _show_step(sum((p.columns for p in predictions), NOTHING), machine, staleness)
    layout, why = choice(predictions)
    out.print(f"Choice: {layout}, because {why}.")
    out.print(_ROWS_ARE_NOT_BUILT + (" Until it is, the job runs by columns." if layout == "rows" else ""))


def _show_step(cost: Any, machine: Machine, staleness: int) -> None:
    """What is hidden behind what, by columns, to scale."""
    out = console()
    forward = machine.dense_seconds * machine.forward_share
    dense = (("forward", forward), ("backward", machine.dense_seconds - forward))
    side = (("update", cost.update_seconds), ("lookup", cost.lookup_seconds))
    scale = max(seconds for _, seconds in (*dense, *side)) or 1.0
    for name, seconds in dense:
        out.print(f"  {name:8} {'█' * round(_BAR * seconds / scale)} {seconds * 1e3:.2f} ms")
    for (name, seconds), hidden in zip(side, cost.hidden_seconds(machine, staleness), strict=True):
        bar = "▒" * round(_BAR * hidden / scale) + "!" * round(_BAR * (seconds - hidden) / scale)
        out.print(f"  {name:8} {bar} {seconds * 1e3:.2f} ms")
    out.print(f"  ▒ hidden  ! exposed, with staleness {staleness}")
    out.print()


def _figures(cost: Any) -> tuple[str, str, str, str]:
    return f"{cost.bytes_sent / 1e6:.3f}", f"{cost.lookup_seconds * 1e3:.3f}", f"{cost.update_seconds * 1e3:.3f}", ""


def _print_table(lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [
            f"{cell:{w}}" if n == 0 else f"{cell:>{w}}" for n, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        console().print("  " + "  ".join(cells).rstrip())


def _parts(table: TableMemory) -> tuple[int, int, int]:
    return table.weights, table.state, table.arena_of_rank


def _as_data(
    checked: CheckedJob, memory: list[TableMemory], predictions: list[Prediction], machine: Machine
) -> dict[str, Any]:
    import dataclasses

    from ..jobs.prediction import NOTHING, choice

    def described(cost: Any) -> dict[str, float]:
        exposed = cost.exposed_seconds(machine, checked.job.staleness)
        return {**dataclasses.asdict(cost), "bytes_sent": cost.bytes_sent, "exposed_seconds": exposed}

    layout, why = choice(predictions)
    tables = {
        of_memory.name: {
            "weights_bytes": of_memory.weights,
            "state_bytes": of_memory.state,
            "arena_bytes_of_process": of_memory.arena,
            "bytes_of_rank": of_memory.per_rank,
            "columns": described(prediction.columns),
            "rows": described(prediction.rows),
        }
        for of_memory, prediction in zip(memory, predictions, strict=True)
    }
    return {
        "tables": tables,
        "columns": described(sum((p.columns for p in predictions), NOTHING)),
        "rows": described(sum((p.rows for p in predictions), NOTHING)),
        "choice": layout,
        "because": why,
        "rows_are_built": False,
    }


def _plot(
    path: Path, checked: CheckedJob, memory: list[TableMemory], predictions: list[Prediction], machine: Machine
) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        fail('--plot needs matplotlib, which is not installed: python -m pip install "async-emb[train]"')
    figure = Figure(figsize=(9, 2.2 + 0.6 * len(memory)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    of_memory, of_time = figure.subplots(1, 2)
    names = [table.name for table in memory]
    left = [0.0] * len(memory)
    for part, label in enumerate(("weights", "optimizer state", "arena")):
        widths = [_parts(table)[part] / 2**20 for table in memory]
        of_memory.barh(names, widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    of_memory.set_xlabel("MiB of a rank")
    for shift, layout in ((-0.2, "columns"), (0.2, "rows")):
        costs = [getattr(prediction, layout) for prediction in predictions]
        places = [number + shift for number in range(len(costs))]
        lookup = [cost.lookup_seconds * 1e3 for cost in costs]
        of_time.barh(places, lookup, height=0.35, label=f"lookup, {layout}")
        update = [cost.update_seconds * 1e3 for cost in costs]
        of_time.barh(places, update, left=lookup, height=0.35, label=f"update, {layout}")
    of_time.set_yticks(range(len(names)), names)
    of_time.set_xlabel("ms of a step (model); rows are not built")
    for axes in (of_memory, of_time):
        axes.invert_yaxis()
        axes.legend(
            frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3 if axes is of_memory else 2
        )
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(Path(checked.document.name).name)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
