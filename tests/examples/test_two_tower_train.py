"""The model learns, the plain peer follows the rule of the tables, and the command line leaves what it promises."""

import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.two_tower.data import find_ratings, read_ratings, split_by_time
from examples.two_tower.model import init_params, loss_fn
from examples.two_tower.plain_jax import PlainTrainer, rowwise_adagrad
from examples.two_tower.report import RunFolder, read_rows
from examples.two_tower.settings import Settings
from examples.two_tower.synthetic import SyntheticStream
from examples.two_tower.train import Stopped, make_mesh, train

ROOT = Path(__file__).parents[2]
PLAIN = Settings(schedule="plain", devices=1, width=16, hidden=16, output=8, epochs=2, batch=512)

DEVICES = 4 if len(jax.devices()) >= 4 else 1


def silent(step, total, loss, test_auc):
    pass


def test_filling_does_not_change_the_loss_or_its_gradients():
    params = init_params(jax.random.key(0), PLAIN)
    rng = np.random.default_rng(0)
    rows = {name: rng.standard_normal((6, 16), np.float32) for name in ("users", "items")}
    labels = np.array([0, 1, 1, 0, 1, 1], np.float32)
    weights = np.array([1, 1, 1, 1, 0, 0], np.float32)
    short = {name: values[:4] for name, values in rows.items()}
    whole = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, rows, {"labels": labels, "weights": weights})
    cut = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, short, {"labels": labels[:4], "weights": weights[:4]})
    np.testing.assert_allclose(whole[0], cut[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), whole[1][0], cut[1][0])
    for name in rows:
        np.testing.assert_allclose(whole[1][1][name][:4], cut[1][1][name], rtol=1e-5, atol=1e-7)
        assert not np.any(whole[1][1][name][4:])


def test_the_dense_rule_is_rowwise_adagrad_and_leaves_rows_without_gradient_alone():
    table = np.ones((3, 4), np.float32)
    gradient = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [0.5, 0, 0, 0]], np.float32)
    state = np.array([1.0, 2.0, 0.0], np.float32)
    new, accumulated = rowwise_adagrad(
        jnp.asarray(table), jnp.asarray(state), jnp.asarray(gradient), learning_rate=0.1, eps=1e-8, decay=0.5
    )
    np.testing.assert_allclose(accumulated, [0.5 + 7.5, 2.0, 0.0625], rtol=1e-6)
    np.testing.assert_allclose(new[0], 1 - 0.1 / np.sqrt(8.0) * gradient[0], rtol=1e-6)
    np.testing.assert_array_equal(new[1], table[1])
    np.testing.assert_allclose(new[2], 1 - 0.1 / 0.25 * gradient[2], rtol=1e-6)


def test_padding_is_never_trained():
    stream = SyntheticStream(2000, 0, 0.1)
    trainer = PlainTrainer(PLAIN, stream, make_mesh(1))
    before = np.asarray(trainer._state.tables["users"])
    batch = next(stream.batches(512, 0, 0))
    for name in ("users", "items"):
        batch[name][8:] = -1
    batch["weights"][8:] = 0
    trainer.step(batch, None)
    changed = np.flatnonzero(np.any(np.asarray(trainer._state.tables["users"]) != before, axis=1))
    assert set(changed) == set(batch["users"][:8])


def test_the_plain_peer_learns_the_planted_taste(tmp_path):
    stream = SyntheticStream(60_000, 0, 0.1)
    settings = Settings(schedule="plain", devices=1, epochs=6, batch=512, table_learning_rate=0.05)
    result = train(settings, stream, RunFolder(tmp_path, "run", {}), silent)
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert result.test_auc > 0.75
    assert [row.step for row in rows] == list(range(1, result.steps + 1))
    assert [row.test_auc for row in rows if row.test_auc is not None][-1] == pytest.approx(result.test_auc, abs=1e-6)
    assert rows[-1].examples == 6 * stream.train_size
    assert rows[-1].loss < rows[0].loss


def plain_and(schedule, dataset, settings, folder):
    """Results and losses of the plain peer and of a schedule, from the same settings."""
    results, losses = [], []
    for one in ("plain", schedule):
        own = dataclasses.replace(settings, schedule=one, devices=DEVICES)
        results.append(train(own, dataset, RunFolder(folder, one, {}), silent))
        losses.append([row.loss for row in read_rows(folder / one / "metrics.csv")])
    return results, losses


def test_staleness_0_follows_the_plain_peer_step_by_step(tmp_path):
    stream = SyntheticStream(10_000, 0, 0.2)
    (plain, exact), losses = plain_and("staleness0", stream, PLAIN, tmp_path)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert exact.test_auc == pytest.approx(plain.test_auc, abs=0.002)
    assert exact.exposed_seconds is not None
    assert plain.exposed_seconds is None


def test_staleness_1_sees_each_update_one_step_late(tmp_path):
    stream = SyntheticStream(10_000, 0, 0.2)
    (_, late), losses = plain_and("staleness1", stream, PLAIN, tmp_path)
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert losses[1][1] != pytest.approx(losses[0][1], rel=1e-5)
    assert late.exposed_seconds is not None


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("recbole") is None,
    reason="MovieLens-100K is not installed: pip install --no-deps recbole==1.2.1",
)
def test_staleness_1_costs_less_than_five_thousandths_of_auc_on_movielens(tmp_path):
    dataset = split_by_time(read_ratings(find_ratings(None)), 0.1)
    (plain, late), _ = plain_and("staleness1", dataset, Settings(epochs=2), tmp_path)
    assert plain.test_auc > 0.71
    assert late.test_auc == pytest.approx(plain.test_auc, abs=0.005)


def test_the_same_seed_gives_the_same_losses(tmp_path):
    stream = SyntheticStream(3_000, 0, 0.1)
    for name in ("one", "two"):
        train(PLAIN, stream, RunFolder(tmp_path, name, {}), silent)
    one, two = (read_rows(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    assert [row.loss for row in one] == [row.loss for row in two]


def test_a_run_that_is_stopped_leaves_the_rows_so_far(tmp_path):
    stop = threading.Event()

    def stop_at_ten(step, total, loss, test_auc):
        if step == 10:
            stop.set()

    with pytest.raises(Stopped):
        train(PLAIN, SyntheticStream(20_000, 0, 0.1), RunFolder(tmp_path, "run", {}), stop_at_ten, stop)
    assert [row.step for row in read_rows(tmp_path / "run" / "metrics.csv")] == list(range(1, 9))


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "examples.two_tower", "train", "--plain", *options]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}


def test_the_command_prints_its_results_and_writes_csv_toml_and_png(tmp_path):
    options = ("--synthetic", "4000", "--epochs", "1", "--out", str(tmp_path), "--name", "first")
    done = subprocess.run(command(*options), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"test AUC +0\.\d{4}", done.stdout)
    assert re.search(r"examples/s +[\d,]+", done.stdout)
    assert "exposed time" in done.stdout
    config = tomllib.loads((tmp_path / "first" / "config.toml").read_text(encoding="utf-8"))
    assert config["settings"]["devices"] == 4
    assert config["data"]["train_examples"] == 3600
    assert len(read_rows(tmp_path / "first" / "metrics.csv")) == 4
    assert (tmp_path / "first" / "metrics.png").read_bytes().startswith(b"\x89PNG")

    again = command("--config", str(tmp_path / "first" / "config.toml"), "--out", str(tmp_path), "--name", "again")
    again.remove("--plain")  # the file says it
    done = subprocess.run(again, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        tomllib.loads((tmp_path / "again" / "config.toml").read_text(encoding="utf-8"))["settings"]
        == config["settings"]
    )
    losses = [[row.loss for row in read_rows(tmp_path / run / "metrics.csv")] for run in ("first", "again")]
    assert losses[0] == losses[1]


def test_bad_data_ends_the_command_with_one_message_and_no_traceback(tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n1\t2\t[x]\t4\n")
    options = ("--data", str(tmp_path), "--out", str(tmp_path / "runs"))
    done = subprocess.run(command(*options), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: {tmp_path / 'u.data'}:2: rating '[x]' is not a number" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_command_ends_within_two_seconds_and_leaves_a_readable_csv(tmp_path):
    csv = tmp_path / "long" / "metrics.csv"
    options = ("--synthetic", "2000000", "--epochs", "100", "--out", str(tmp_path), "--name", "long")
    process = subprocess.Popen(
        command(*options), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (csv.exists() and len(read_rows(csv)) >= 3):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "the run wrote no metrics"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        interrupted = time.monotonic()
        output, _ = process.communicate(timeout=30)
        assert time.monotonic() - interrupted < 2.0
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"the metrics up to here are in {csv}" in output
    assert len(read_rows(csv)) >= 3
