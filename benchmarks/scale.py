"""What a step costs as ranks grow, by the model of jax_bridge.processes.traffic: the tables of docs/scale.md.

python -m benchmarks.scale
"""

from __future__ import annotations

from jax_bridge.processes import traffic

RANKS = (2, 4, 8, 16, 32, 64, 256, 1024)
TOKENS_PER_RANK, ITEMSIZE = 4096, 2
WIDTHS = (64, 512)
# (distinct ids among a rank's tokens; by how much doubling the ranks raises the distinct ids of the batch)
BATCHES = {"every id occurs once": (1.0, 2.0), "ids repeat, in a rank and across ranks": (0.6, 1.6)}

LATENCY, BANDWIDTH = 20e-6, 12.5e9  # a message between machines; 100 Gbit/s


def both(ranks: int, width: int, batch: str) -> tuple[traffic.Traffic, traffic.Traffic]:
    """One device a process: (by columns, by rows)."""
    padded = -(-width // ranks) * ranks
    own, growth = BATCHES[batch]
    unique_per_rank = int(TOKENS_PER_RANK * own)
    columns = traffic.column_sharded(
        processes=ranks,
        ranks_per_process=1,
        tokens_per_rank=TOKENS_PER_RANK,
        width=padded,
        logical_width=width,
        itemsize=ITEMSIZE,
        unique=int(unique_per_rank * growth ** ((ranks - 1).bit_length())),
    )
    rows = traffic.row_sharded(
        ranks=ranks,
        tokens_per_rank=TOKENS_PER_RANK,
        width=width,
        itemsize=ITEMSIZE,
        unique_per_rank=unique_per_rank,
    )
    return columns, rows


def table(width: int, batch: str) -> str:
    lines = [
        "| ranks | columns: MB a step | ms | rows: MB a step | ms | faster |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for ranks in RANKS:
        columns, rows = both(ranks, width, batch)
        times = [t.seconds(latency=LATENCY, bandwidth=BANDWIDTH) * 1e3 for t in (columns, rows)]
        lines.append(
            f"| {ranks} | {columns.step_bytes / 1e6:.2f} | {times[0]:.2f} | {rows.step_bytes / 1e6:.2f} | "
            f"{times[1]:.2f} | {'columns' if times[0] < times[1] else 'rows'} |"
        )
    return "\n".join(lines)


def main() -> None:
    for batch in BATCHES:
        for width in WIDTHS:
            print(f"{width} columns, {batch}\n\n{table(width, batch)}\n")


if __name__ == "__main__":
    main()
