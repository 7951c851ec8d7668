"""The two-tower model in torch alone learns what the JAX one learns, and imports no JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.two_tower import pure_torch
from examples.two_tower.report import read_rows

ROOT = Path(__file__).parents[2]
OPTIONS = ["--synthetic", "20000", "--epochs", "1", "--batch", "256", "--width", "16", "--name", "run"]
WITHOUT_JAX = """
import sys
from examples.two_tower.pure_torch import main
main(sys.argv[1:])
assert not [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "jax_bridge")]
"""


def in_a_process(arguments: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_JAX, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("staleness", "run"), [("0", pure_torch.main), ("1", in_a_process)])
def test_it_learns_and_leaves_its_metrics(tmp_path, capfd, staleness, run):
    printed = run([*OPTIONS, "--staleness", staleness, "--out", str(tmp_path)]) or capfd.readouterr().out
    (row,) = read_rows(tmp_path / "run" / "metrics.csv")
    assert (row.epoch, row.examples) == (1, 18000)
    assert row.test_auc > 0.65, "a guess has 0.5"
    assert printed.startswith(f"test AUC {row.test_auc:.4f}, files in ")
