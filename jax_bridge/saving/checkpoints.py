"""``Checkpoints``: states of a training step in a directory, each there as a whole or not at all.

A checkpoint holds what a snapshot does (``snapshots``), but nobody ever has all of it: each process writes and reads
what its devices hold. Nothing in it knows the layout: tables are saved without their padding.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from torch_ext.common.table_rules import is_integer

from .. import runtime
from ..errors import AsyncEmbError, CheckpointError, ContextError, Problem, raise_problems, show
from ..placing import fetch
from ..processes.agreement import Agreement
from ..steps import snapshots
from ..steps.snapshot_checks import problems_of
from ..steps.step_program import StepState
from ..steps.train import TrainStep
from . import checkpoint_files as files


class Checkpoints:
    """The checkpoints of a training step in one directory.

    Over several processes every one of them makes the same calls, on a directory of a file system that all share. A
    wait for another process ends after ``ASYNC_EMB_TIMEOUT_SECONDS`` with an error that names it.

    Args:
        directory: where they are; made by the first ``save``. For this training alone.
        step: the training step whose states they are.
        max_to_keep: how many to keep: ``save`` removes the oldest others. None for all.

    Raises:
        ContextError: an argument that cannot work.
        ImportError: Orbax is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], step: TrainStep, *, max_to_keep: int | None = 3) -> None:
        if problems := list(_wrong_arguments(directory, step, max_to_keep)):
            raise_problems(problems)
        files.orbax()
        self.directory = Path(directory).absolute()
        self._step = step
        self._max_to_keep = max_to_keep
        self._is_ours = False  # the directory has no checkpoints of another run

    def save(self, state: StepState) -> int:
        """Writes a checkpoint of ``state``, which training goes on from undisturbed. Waits until it is complete.

        What is under way with staleness 1 is in it: the gradients that are staged, and the ids of the announced batch.

        Args:
            state: the one that the last call of the step returned.

        Returns:
            Its number: ``state.step``.

        Raises:
            PipelineError, IdError: what an earlier step had to say, or a state that is not the last one.
            CheckpointError: it could not be written, a checkpoint of this number is there already, or another process
                did not do its part. Complete checkpoints are as they were.
            ContextError: the directory has checkpoints of another run.
        """
        handles = self._step._at_rest(state)
        number = int(fetch(state.step))
        with self._together(f"Checkpoints.save of step {number}") as together:
            self._require_free(number, state)
            if together.leads:
                self.directory.mkdir(parents=True, exist_ok=True)
                files.remove_left_overs(self.directory)
            files.write(self._path(number), self._header(number), self._tree(state, handles), together)
            if together.leads:
                for old in self._too_many(number):
                    files.remove(self.directory, old)
            together.hear("complete the checkpoint")
        self._step._unsaved = None
        return number

    def steps(self) -> list[int]:
        """The numbers of the complete checkpoints, ascending."""
        return files.steps_in(self.directory)

    def latest(self) -> int | None:
        """The largest of ``steps()``, None where there is none."""
        return max(self.steps(), default=None)

    def restore(self, params: Any, which: int | None = None) -> StepState:
        """The state of a checkpoint, on the step's mesh. Drops what an earlier state had under way.

        The next call continues bit for bit on the same number of devices, see ``TrainStep.restore``.

        Args:
            params: as they were given to ``TrainStep.init``: their tree, shapes and dtypes count, not their values.
            which: its number; the latest unless given.

        Raises:
            CheckpointError: there is none, it is damaged, or another process did not do its part.
            ContextError: it does not fit: other tables, rows, widths, dtypes, optimizers or parameters, another
                schedule. Every difference is listed.

        Where it raises, nothing has been dropped: the step's state is as it was.
        """
        step = self._step
        with self._together(f"Checkpoints.restore of {'the latest' if which is None else f'step {which}'}") as together:
            number = together.hear("find the checkpoint", self._choose(which) if together.leads else None)
            try:
                saved, weights, optimizers = self._read(self._path(number[together.leader]), params)
            except CheckpointError as error:
                error.add_note(f"Complete checkpoints: {show(self.steps())}. Choose another with which=...")
                raise
            together.hear("read the checkpoint")
        tables = {name: table.own(weights.pop(name), optimizers[name]) for name, table in step.tables.items()}
        return step._go_on_from(saved, tables)

    def delete(self, which: int) -> None:
        """Removes a checkpoint, in one process for all.

        Raises:
            CheckpointError: there is none of this number, or it cannot be removed.
        """
        with self._together(f"Checkpoints.delete of step {which}") as together:
            if together.leads:
                files.remove(self.directory, self._choose(which))
            together.hear("remove the checkpoint")

    # ---- parts ----

    def _path(self, number: int) -> Path:
        return self.directory / str(number)

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[Agreement]:
        """This call, in all processes. What fails outside of this package is said in its words."""
        call = f"{call} in {self.directory}"
        handle = next(iter(self._step.tables.values())).smallest_handle()
        with Agreement(handle, call, runtime.timeout_seconds()) as together:
            try:
                yield together
            except AsyncEmbError:
                raise
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                message = f"async_emb {call} has failed: {text.splitlines()[0]}"
                raise CheckpointError(f"{message}. Complete checkpoints: {show(self.steps())}") from error

    def _choose(self, which: int | None) -> int:
        found = self.steps()
        if which is None and found:
            return found[-1]
        if which in found:
            assert which is not None
            return which
        if not self.directory.is_dir():
            why = "it does not exist"
        elif not any(self.directory.iterdir()):
            why = "it is empty"
        elif not found:
            why = f"it has {show(sorted(path.name for path in self.directory.iterdir())[:8])}"
        else:
            why = f"there are {show(found)}"
        what = "complete checkpoint" if which is None else f"complete checkpoint of step {which}"
        raise CheckpointError(f"async_emb: the directory {self.directory} has no {what}: {why}")

    def _too_many(self, latest: int) -> list[int]:
        if self._max_to_keep is None:
            return []
        others = [number for number in self.steps() if number != latest]
        return others[: max(0, len(others) + 1 - self._max_to_keep)]

    def _read(self, path: Path, params: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """(all but the tables as in a snapshot, weights and optimizer's arrays by table). Drops nothing."""
        manifest, shapes, tables = files.read_manifest(path), _shapes(params), self._step.tables
        self._require_fit(path, manifest, shapes)
        for table in tables.values():
            runtime.require_devices(table.smallest_handle())
        tree = manifest["tree"]
        saved = {
            "params": _unflatten(shapes, _read_all(path, tree["params"])),
            "opt_state": _unflatten(self._opt_state_of(shapes), _read_all(path, tree["opt_state"])),
            "step": np.int32(manifest["step"]),
            "staged": {name: _read_all(path, update) for name, update in tree["staged"].items()},
            "armed": None if tree["armed"] is None else _read_all(path, tree["armed"]),
        }
        weights = {
            name: table.read_weights(_reader(path, tree["tables"][name]["weights"])) for name, table in tables.items()
        }
        return saved, weights, {name: _read_all(path, tree["tables"][name]["optimizer"]) for name in tables}

    def _header(self, number: int) -> dict[str, Any]:
        return {
            "step": number,
            "staleness": self._step.staleness,
            "async_emb": importlib.metadata.version("async-emb"),
            "tables": {name: {"optimizer": type(t.optimizer).__name__} for name, t in self._step.tables.items()},
        }

    def _tree(self, state: StepState, handles: Mapping[str, Any]) -> dict[str, Any]:
        staged = snapshots.staged_on_mesh(handles)
        armed = self._step._armed
        return {
            "params": _flatten(state.params),
            "opt_state": _flatten(state.opt_state),
            "tables": {
                name: {
                    "weights": files.Columns(state.tables[name].weights, table.width),
                    "optimizer": dict(state.tables[name].optimizer),
                }
                for name, table in self._step.tables.items()
            },
            "staged": {
                name: {**update, "grads": files.Columns(update["grads"], self._step.tables[name].width)}
                for name, update in staged.items()
            },
            "armed": None if armed is None else dict(armed),
        }

    # ---- what fits ----

    def _require_free(self, number: int, state: StepState) -> None:
        """Refuses to write over a checkpoint, and into a directory of somebody else, whose checkpoints would go."""
        if self._path(number).exists():
            error = CheckpointError(
                f"async_emb: there is a checkpoint of step {number} in {self.directory} already, and none is written "
                "over"
            )
            error.add_note(f"checkpoints.delete({number}) removes it. A run that begins anew needs another directory.")
            raise error
        if self._is_ours:
            return
        for other in self.steps():
            try:
                path = self._path(other)
                self._require_fit(path, files.read_manifest(path), _shapes(state.params), under_way=False)
            except AsyncEmbError as error:
                error.add_note(
                    f"Nothing was written: this run's checkpoints would take the place of those in {self.directory}. "
                    "Give it a directory of its own."
                )
                raise
        self._is_ours = True

    def _require_fit(self, path: Path, manifest: Mapping[str, Any], params: Any, *, under_way: bool = True) -> None:
        problems = list(self._differences(manifest, params, under_way))
        if not problems:
            return
        try:
            raise_problems(problems)
        except ContextError as error:
            error.add_note(f"The checkpoint is {path}.")
            raise

    def _differences(self, manifest: Mapping[str, Any], params: Any, under_way: bool) -> Iterator[Problem]:
        tree, step = manifest["tree"], self._step
        opt_state = self._opt_state_of(params)
        yield from _other_leaves("params", tree["params"], params, "what was given as params")
        yield from _other_leaves("opt_state", tree["opt_state"], opt_state, "the step's optimizer")
        for name, table in step.tables.items():
            was, now = manifest["tables"].get(name, {}).get("optimizer"), type(table.optimizer).__name__
            if was not in (None, now):
                message = f"async_emb restore: checkpoint['tables'][{name!r}] was trained by {was}, but the table's"
                advice = "Give the table the optimizer of the run that wrote the checkpoint."
                yield Problem(f"{message} optimizer is {now}", (advice,))
        armed = tree["armed"]
        stands_for: dict[str, Any] = {
            "params": params,
            "opt_state": opt_state,
            "step": np.int64(manifest["step"]),
            "tables": {
                name: {"weights": _shape_of(x["weights"]), "optimizer": _shapes_of(x["optimizer"])}
                for name, x in tree["tables"].items()
            },
            "staged": {name: _shapes_of(x) for name, x in tree["staged"].items()} if under_way else {},
            "armed": None if armed is None or not under_way else _shapes_of(armed),
        }
        found = problems_of(step.tables, stands_for, staleness=step.staleness, optimizer=step._optimizer)
        for problem in found:
            yield Problem(_of_checkpoints(problem.message), tuple(map(_of_checkpoints, problem.advice)))

    def _opt_state_of(self, params: Any) -> Any:
        """Shapes of the state of the dense optimizer."""
        init = self._step._optimizer.init
        try:
            return jax.eval_shape(init, params)
        except jax.errors.ConcretizationTypeError:  # it looks at values
            return _shapes(init(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)))


def _wrong_arguments(directory: Any, step: Any, max_to_keep: Any) -> Iterator[Problem]:
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory) or "://" in str(directory):
        message = f"async_emb Checkpoints: directory={show(directory)} must be the path of a directory"
        yield Problem(message, ("It is on a file system that all processes of the job share.",), wrong_type=True)
    if not isinstance(step, TrainStep):
        message = f"async_emb Checkpoints: step={show(step)} must be what train_step returned"
        yield Problem(message, ("checkpoints = Checkpoints(directory, step)",), wrong_type=True)
    if max_to_keep is not None and (not is_integer(max_to_keep) or max_to_keep < 1):
        message = f"async_emb Checkpoints: max_to_keep={show(max_to_keep)} must be an integer of at least 1, or None"
        advice = "It is how many checkpoints stay in the directory; None keeps all."
        yield Problem(message, (advice,), wrong_type=not is_integer(max_to_keep))


def _other_leaves(part: str, saved: Mapping[str, Any], wanted: Any, whose: str) -> Iterator[Problem]:
    found = {key: _named(_shape_of(entry)) for key, entry in saved.items()}
    needs = {key: _named(x) for key, x in _flatten(wanted).items()}
    for key in dict.fromkeys([*found, *needs]):
        if found.get(key) == needs.get(key):
            continue
        where = files.name_of(part, key)
        if key not in needs:
            yield Problem(
                f"async_emb restore: the checkpoint has {where} ({found[key]}), but {whose} has no such array"
            )
        elif key not in found:
            yield Problem(f"async_emb restore: the checkpoint has no {where}, but {whose} needs it: {needs[key]}")
        else:
            yield Problem(f"async_emb restore: {where} is {found[key]}, but {whose} needs {needs[key]}")


def _of_checkpoints(text: str) -> str:
    return text.replace("snapshot[", "checkpoint[").replace("the snapshot", "the checkpoint")


def _flatten(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, which JAX prints alike in every process."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[key] for key in _flatten(like)])


def _shapes(tree: Any) -> Any:
    return jax.eval_shape(lambda tree: tree, tree)


def _shape_of(entry: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), np.dtype(entry["dtype"]))


def _shapes_of(entries: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {key: _shape_of(entry) for key, entry in entries.items()}


def _named(x: Any) -> str:
    return f"{x.dtype.name}{list(x.shape)}"


def _reader(path: Path, entry: Mapping[str, Any]) -> Any:
    return lambda first, last: files.read(path, entry, (first, last))


def _read_all(path: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: files.read(path, entry) for key, entry in entries.items()}
