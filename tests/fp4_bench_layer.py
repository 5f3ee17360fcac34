"""A small FP4 layer of the benchmark in host memory, where the operations run the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_moe.bench import fp4
from cupy_moe.bench.fp4 import Fp4BenchLayer
from cupy_moe.bench.workloads import Ids, Workload
from cupy_moe.testing.fp4_inputs import HOST_RESOURCES, fp4_layer

SMALL = Workload("small", "none", 256, 256, num_experts=8, top_k=2, local_num_experts=8)


def host_layer(mode: str = "bf16", form: str = "whole") -> Fp4BenchLayer:
    """Make the layer of a form."""
    made = fp4_layer(mode, "whole", fp4._sizes(SMALL))
    whole = {n: fp4._to_torch(v) if hasattr(v, "dtype") else v for n, v in made.items()}
    layer = Fp4BenchLayer(SMALL, mode, "whole", whole)
    return layer if form == "whole" else layer.partitioned(form, HOST_RESOURCES)


def routing(num_tokens: int, seed: int = 0) -> tuple[Ids, Any]:
    """Ids, some experts without a token, and weights that BF16 holds."""
    rng = np.random.default_rng(seed)
    keys = rng.random((num_tokens, SMALL.num_experts - 2))
    ids = np.argsort(keys, axis=1)[:, : SMALL.top_k].astype(np.int32)
    return ids + (ids >= 3), rng.choice(np.float32([0.125, 0.25, 0.5]), ids.shape)
