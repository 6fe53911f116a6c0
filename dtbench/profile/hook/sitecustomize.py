"""Run by every Python process of a job under `dtbench profile -- COMMAND`, which finds it on PYTHONPATH: runs the
`sitecustomize` that it hides, and has a process record once that joins a process group.

Most processes are no rank, and their Python may lack dtbench: nothing is imported that the interpreter does not have.
"""

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False  # `typing` would be an import
if TYPE_CHECKING:
    from types import ModuleType
_HERE = os.path.dirname(__file__)  # noqa: PTH120 - so would pathlib


class _WhenLoaded:
    """Stands in sys.meta_path until torch.distributed is imported; to import torch here would slow every process."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "torch.distributed.distributed_c10d":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)  # type: ignore[arg-type]
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self.load, spec.loader.exec_module = spec.loader.exec_module, self.load_and_wrap  # type: ignore[method-assign]
        return spec

    def load_and_wrap(self, module: "ModuleType") -> None:
        from functools import wraps

        self.load(module)
        join = module.init_process_group

        @wraps(join)
        def init_process_group(*args: object, **kwargs: object) -> object:
            joined = join(*args, **kwargs)
            try:
                (sys.modules.get("dtbench_recorder") or _load("dtbench_recorder", [_HERE])).start()
            except Exception as error:  # the job goes on as it would without us
                sys.stderr.write(f"dtbench: this rank is not recorded: {type(error).__name__}: {error}\n")
            return joined

        module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _load(name: str, path: "list[str]") -> "ModuleType":
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}", name=name)  # `site` passes over it for a `sitecustomize`
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if os.environ.get("DTBENCH_RECORD_FOLDER"):
    sys.meta_path.insert(0, _WhenLoaded())  # type: ignore[arg-type]
sys.path[:] = [
    entry for entry in sys.path if entry != _HERE
]  # the program finds what it would find without us
_load("sitecustomize", sys.path)
