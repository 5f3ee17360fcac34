"""Workspaces and calls of the finalize on emulated ranks."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_moe.comm import FinalizeWorkspace, Group, check_arrays
from cupy_moe.comm.layout import SchemeLimits
from cupy_moe.kernels.finalize_rmsnorm import FinalizeScheme
from tests.finalize_cases import BF16, NAN, FinalizeCase

LIMITS = {
    FinalizeScheme.EveryRank: SchemeLimits(99, 0),
    FinalizeScheme.ExpertOwner: SchemeLimits(0, 99),
    FinalizeScheme.TokenOwner: SchemeLimits(0, 0),
}
SCHEMES = pytest.mark.parametrize("scheme", FinalizeScheme, ids=lambda scheme: scheme.name)


def open_workspace(group: Group, case: FinalizeCase, **options: object) -> FinalizeWorkspace:
    sizes = {"hidden_size": case.hidden_size, "top_k": case.top_k, "max_tokens": 64}
    return FinalizeWorkspace(group, **{"device": -1, **sizes, "timeout_s": 60.0, **options})


def call(workspace: FinalizeWorkspace, case: FinalizeCase) -> np.ndarray:
    out = np.full((case.num_tokens, case.hidden_size), NAN, np.uint16)
    arrays = check_arrays(
        *case.arguments(workspace.group.rank),
        out.view(BF16),
        device=-1,
        hidden_size=case.hidden_size,
        top_k=case.top_k,
    )
    workspace.run(arrays, case.options, 0)
    workspace.check()
    return out
