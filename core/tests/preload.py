"""Imports for the fork server of the tests, so that forked ranks and programs need not import torch for seconds.

`gloo_world` and `dtbench.tests.programs` name it to `multiprocessing`, whose server imports it and does nothing else.
"""

import gc
import os

# The same as in ranks of a run. torch reads it while it loads. Forked processes set their own environment.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo.backends.common
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.launcher.api
import torch.profiler  # noqa: F401

import dtbench_core._public
import dtbench_core.parallel
import dtbench_core.simulate  # noqa: F401

# A collection in a fork would walk through all of this, and copy its pages.
gc.collect()
gc.freeze()
