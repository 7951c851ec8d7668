"""What a launcher starts in these tests: a process that finds its job in the variables of the launcher, and trains.

torchrun --nproc-per-node 2 -m tests.multiprocess.launched FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

DEVICES = 2


def main(folder: Path) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ.setdefault("ASYNC_EMB_TIMEOUT_SECONDS", "60")
    import jax
    import numpy as np

    import jax_bridge

    job = jax_bridge.initialize(timeout_seconds=60)

    from tests.jax_bridge import _training as training
    from tests.multiprocess import _recovery as recovery

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("table",))
    with training.make_step(mesh, 1) as step:
        digest = recovery.finish(step, training.start(step))
    result = {"process": job.process_id, "of": job.num_processes, "source": job.source, "digest": digest}
    (folder / f"{job.process_id}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
