"""Lookups and updates on one GPU, beside a plain copy, torch, JAX and FBGEMM: `python -m benchmarks.gpu`.

Prints one table and writes everything to a JSON file. Results are checked for equality before anything is timed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX must leave room for torch, and for us

import numpy as np
import torch

from .gpu_cases import ROWS, TOKENS, Config, configs
from .gpu_ours import Ours, check_bits, copy_bandwidth, kernel_times, timed, timed_parts
from .gpu_peers import PEERS, absent
from .gpu_table import Line, as_json, as_text, caption
from .ids import make_ids
from .timing import times_of

BATCHES = 4  # of ids, in turn: what one lookup leaves in the cache does not serve the next


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four lines of the table instead of 24")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--repetitions", type=int, default=50, help="of each measurement, at least 50 for the record")
    parser.add_argument("--budget", type=float, default=120, help="seconds after which no further line is begun")
    parser.add_argument("--peers", default="torch,jax,fbgemm", help="which, comma separated; '' for none")
    parser.add_argument("--json", type=Path, default=Path("build/gpu/benchmark.json"))
    options = parser.parse_args(arguments)
    if reason := no_gpu():
        print(f"benchmark: not run, because {reason}", file=sys.stderr)
        return 2

    with torch.cuda.stream(torch.cuda.Stream()):  # as XLA's: one that the default stream does not wait for
        run(options)
    return 0


def run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    peers = [name for name in options.peers.split(",") if name]
    notes = [reason for name in peers if (reason := absent(name))]
    card = torch.cuda.get_device_name()
    bandwidth = copy_bandwidth(2 << 30, options.repetitions)
    lines: list[Line] = []
    for (width, dtype), group in itertools.groupby(configs(options.quick), key=lambda c: (c.width, c.dtype)):
        if time.monotonic() - began > options.budget:
            notes.append(f"width {width}, {dtype}: not measured, {options.budget:g} s are over (--budget)")
            continue
        check_bits(width, dtype)
        with Ours(options.rows, width, dtype, options.tokens) as ours:
            lines += [measure(ours, config, peers, options.repetitions) for config in group]
        del ours
        gc.collect()
        torch.cuda.empty_cache()
        print(f"benchmark [{time.monotonic() - began:3.0f} s]: width {width}, {dtype}", file=sys.stderr)
    show(lines, bandwidth, card, options, [*notes, *(note for line in lines for note in line.notes)])
    write(options.json, lines, bandwidth, card, options, notes)


def no_gpu() -> str | None:
    import torch_ext

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    try:
        torch_ext.require_cuda()
    except torch_ext.NativeModuleError as error:
        return str(error)
    return None


def measure(ours: Ours, config: Config, peers: list[str], repetitions: int) -> Line:
    rng = np.random.default_rng(1)
    host = [make_ids(config.ids, ours.rows, ours.tokens, rng) for _ in range(BATCHES)]
    ids = [torch.from_numpy(x).cuda() for x in host]
    grads = torch.randn(ours.tokens, ours.width, device="cuda").mul_(0.01).to(ours.table.dtype)
    line = Line(config, ours.tokens, distinct=int(np.mean([len(np.unique(x)) for x in host])))
    check_rows(ours, ids[0])

    turns = itertools.cycle(ids)
    line.pair = timed([lambda x=x: ours.lookup(x) for x in ids], repetitions=repetitions)
    kernels = kernel_times(lambda: ours.lookup(next(turns)), repetitions)
    if gathers := kernels.get("GatherChunks"):
        line.gather = times_of(gathers)
    else:
        line.notes.append("the profiler saw no kernel of ours (is CUPTI there?): gather is not measured")

    parts = [lambda i: ours.lookup(ids[i % len(ids)]), lambda _: ours.stage(grads), lambda _: ours.update()]
    _, line.stage, line.update = timed_parts(parts, repetitions=repetitions)

    def step() -> None:
        for i, part in enumerate(parts):
            part(i)

    seen = kernel_times(step, 5)
    line.kernels = {name: sum(times) / 5 for name, times in sorted(seen.items())}
    for name in peers:
        if absent(name) is None:
            try:
                line.peers[name] = PEERS[name](ours, ids, grads, repetitions)
            except Exception as error:  # a peer's failure must not hide our numbers
                line.notes.append(f"{name}, {config}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                gc.collect()
                torch.cuda.empty_cache()
    return line


def check_rows(ours: Ours, ids: torch.Tensor) -> None:
    ours.lookup(ids)
    wanted = ours.table.index_select(0, ids)
    assert torch.equal(ours.rows_out.view(torch.int16), wanted.view(torch.int16)), "a lookup gives other rows"


def show(lines: list[Line], bandwidth: float, card: str, options: Any, notes: list[str]) -> None:
    for text in (*caption(bandwidth, card, options.tokens, options.rows), "", as_text(lines, bandwidth)):
        print(text)
    for note in dict.fromkeys(notes):
        print(f"note: {note}")


def write(path: Path, lines: list[Line], bandwidth: float, card: str, options: Any, notes: list[str]) -> None:
    import torch_ext

    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": card,
        "torch": torch.__version__,
        "build": torch_ext.build_info(),
        "rows": options.rows,
        "tokens": options.tokens,
        "repetitions": options.repetitions,
        "copy_bytes_per_second": bandwidth,
        "notes": notes,
        "lines": [as_json(line, bandwidth) for line in lines],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"all numbers are in {path}")


if __name__ == "__main__":
    sys.exit(main())
