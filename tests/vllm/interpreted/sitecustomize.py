"""Makes Triton run its kernels in its interpreter, in every process that has this folder in its PYTHONPATH.

vLLM takes Triton on a CPU where it has a backend of that name. There is no release of one.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends


class Driver:
    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)  # type: ignore[assignment]
