"""Arrays, compilation, launches, streams and scratch memory; knows nothing of experts.

Importing it creates no CUDA context and imports neither CuPy, cuda-bindings nor PyTorch.
"""

from cupy_moe.runtime.requirements import require_gpu

__all__ = ["require_gpu"]
