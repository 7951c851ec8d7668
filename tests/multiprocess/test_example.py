"""The two-tower example over several processes: it learns what it learns in one, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples import multi_process

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
LAUNCHER = [sys.executable, "-m", "examples.multi_process", "--processes", "2"]
TRAIN = ["train", "--synthetic", "4000", "--batch", "512", "--width", "16", "--epochs", "1"]


def run(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [*command, "--out", str(folder), "--name", "run"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_below(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children]


def auc_of(process: subprocess.Popen[str], folder: Path) -> float:
    """What a run says at its end; of all its processes one does."""
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert output.count("test AUC") == 1
    assert sorted(file.name for file in (folder / "run").iterdir()) == ["config.toml", "metrics.csv", "metrics.png"]
    return float(re.search(r"test AUC\s+([\d.]+)", output)[1])


def test_several_processes_learn_what_one_learns(tmp_path):
    # Side by side: each compiles for a while.
    several, one = tmp_path / "several", tmp_path / "one"
    of_several = run(several, *LAUNCHER, "--devices", "2", *TRAIN)
    of_one = run(one, sys.executable, "-m", "examples.two_tower", *TRAIN, "--devices", "4")
    assert auc_of(of_several, several) == pytest.approx(auc_of(of_one, one), abs=0.005)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda which: which.name)
def test_a_launcher_that_is_ended_leaves_no_orphan(tmp_path, which):
    job = run(tmp_path, *LAUNCHER, "--devices", "1", *TRAIN)
    while len(children := processes_below(job.pid)) < 2:
        time.sleep(0.05)
    time.sleep(3)
    begin = time.monotonic()
    job.send_signal(which)
    job.communicate(timeout=30)
    assert job.returncode == (-which if which == signal.SIGKILL else 128 + which)
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() - begin < 10
        time.sleep(0.02)


def test_one_process_that_fails_ends_all_and_is_named(tmp_path, capfd):
    program = "import os, sys, time; time.sleep(60 * (os.environ['RANK'] != '1')); sys.exit('no data here')"
    assert multi_process.launch(3, [sys.executable, "-c", program]) == 1
    assert "process 1 ended with status 1, so all were ended\n[1] no data here" in capfd.readouterr().err
