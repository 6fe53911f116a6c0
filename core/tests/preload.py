"""What the fork server of the tests has imported when it forks ranks and programs: an import takes seconds of a core.

`gloo_world` and `dtbench.tests.programs` name it to `multiprocessing`, whose server imports it and does nothing else.
"""

import gc
import os

# As the ranks of a run have it; torch reads it when it loads. What is forked off sets its own environment.
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
