"""A SLURM of one node, this machine, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.multiprocess.conftest import free_port

CONFIGURATION = """\
ClusterName=one
SlurmctldHost={node}(127.0.0.1)
NodeName={node} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes={node} Default=YES State=UP
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
FirstJobId={first_job}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/daemon.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
"""
PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo")


def why_not() -> str | None:
    """Why there can be none here."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    if missing := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        return f"no {', '.join(missing)} here (Debian: packages slurmctld, slurmd, slurm-client)"
    return None if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which srun finds it."""
    node = socket.gethostname().split(".")[0]
    (folder / "spool").mkdir(parents=True)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            node=node,
            cores=os.cpu_count(),
            controller=free_port(),
            daemon=free_port(),
            first_job=1 + os.getpid() % 4000,  # JAX works its port out of it
            folder=folder,
        )
    )
    variables = {"SLURM_CONF": str(configuration)}
    environment = os.environ | variables | {"PATH": f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"}
    with (folder / "log").open("w") as log, contextlib.ExitStack() as stack:
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", node]):
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
        deadline = time.monotonic() + 30
        while "idle" not in _states(environment):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield variables


def _states(environment: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False).stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
