"""The module that the GPU suite tests is the one that was built for it."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import torch

import torch_ext


def test_the_module_was_built_for_this_suite():
    assert torch_ext.build_info()["torch"] == torch.__version__
    if os.environ.get("ASYNC_EMB_GPU_SUITE") == "1":
        assert Path(torch_ext.native().__file__).parent.parent.name == "gpu"


def test_torch_and_jax_see_the_same_gpus():
    assert torch.cuda.device_count() == len(jax.devices("cuda"))
    assert torch.cuda.get_device_name(0) == jax.devices("cuda")[0].device_kind
