"""What is kept of calls that passed the rules, and what is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cupy_moe import bound_layer, pipeline
from cupy_moe.fused_moe import repeated
from cupy_moe.runtime import scratch
from cupy_moe.runtime.arrays import HOST, describe
from cupy_moe.tiling import Tiling
from tests.array_kinds import ArrayKind
from tests.fp8_calls import OPERATIONS, layer_arguments, on
from tests.posing import Gpu, Posing, posing_arguments, posing_gpu
from tests.test_repeated_calls import full_arguments, passes_the_rules


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with posing_gpu(monkeypatch) as gpu:
        yield gpu


def test_what_is_not_remembered(gpu: Gpu) -> None:
    """What another tiling or a test has put together."""
    with pipeline.tiled_as(Tiling(16, 128, 128)):
        OPERATIONS["routed"](**posing_arguments())
    assert len(repeated.accepted) == 0
    arguments = posing_arguments()
    OPERATIONS["routed"](**arguments)
    with pipeline.tiled_as(Tiling(16, 128, 128)):
        assert not passes_the_rules(lambda: OPERATIONS["routed"](**arguments))
    assert len(repeated.accepted) == 1


@pytest.mark.parametrize("dtype", ["packed", "bfloat16", "float32"])
def test_three_results(gpu: Gpu, dtype: str) -> None:
    """New ones at every call, but for weights that are handed back."""
    arguments = posing_arguments(dtype=dtype, do_finalize=False)
    first = OPERATIONS["routed"](**arguments)
    again: list[Any] = []
    assert passes_the_rules(lambda: again.extend(OPERATIONS["routed"](**arguments)))
    for index, (old, new) in enumerate(zip(first, again, strict=True)):
        is_given = index == 1 and dtype != "packed"
        assert (new is old) is is_given
        assert (new is arguments["topk_ids"][1]) is is_given
        assert (new.shape, new.dtype) == (old.shape, old.dtype)


def test_every_call_warns(gpu: Gpu) -> None:
    arguments = posing_arguments("logits", routing_method_type=3, n_group=2, topk_group=1)
    for _ in range(3):
        with pytest.warns(UserWarning, match="ignores n_group"):
            OPERATIONS["logits"](**{**arguments, "top_k": 1})


@pytest.mark.parametrize("kind", [float, np.float32])
def test_a_nan_is_not_remembered(gpu: Gpu, kind: Callable[[str], object]) -> None:
    """Its key would equal no other, and take the place of one that comes back."""
    for _ in range(3):
        OPERATIONS["logits"](**posing_arguments("logits", routed_scaling_factor=kind("nan")))
    assert len(repeated.accepted) == 0
    assert len(bound_layer._places) == 0


def test_forms_that_come_back_find_their_graphs(gpu: Gpu) -> None:
    """The same addresses need no new launches when the call had to pass the rules again."""
    arguments = full_arguments("routed")
    for _ in range(5):
        OPERATIONS["routed"](**arguments)
    (launches,) = (entry.value for entry in bound_layer._places._entries.values())
    repeated.accepted.cache_clear()
    for _ in range(5):
        OPERATIONS["routed"](**arguments)
    (again,) = (entry.value for entry in bound_layer._places._entries.values())
    assert again is launches
    assert again._runs == 8
    OPERATIONS["routed"](**arguments, enable_pdl=False)
    OPERATIONS["routed"](**arguments, enable_pdl=False)
    arguments["workspace_buffer"] = arguments["workspace_buffer"][:-256]
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
    assert len(bound_layer._places) == 3, "other choices and sizes"
    assert len({place[0] for place in bound_layer._places._entries}) == len(bound_layer._forms) == 3


def test_forms_are_not_kept(gpu: Gpu) -> None:
    arguments = full_arguments("routed")
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
    bound_layer._places.cache_clear()
    repeated.accepted.cache_clear()
    gc.collect()
    assert len(bound_layer._forms) == 0


def test_a_decode_step_is_kept_among_other_forms(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in (repeated.accepted, bound_layer._places):
        monkeypatch.setattr(memory, "max_entries", 4)
    decode = full_arguments("routed")
    OPERATIONS["routed"](**decode)
    for tokens in range(6, 16):
        assert passes_the_rules(lambda: OPERATIONS["routed"](**decode))
        for _ in range(2):
            OPERATIONS["routed"](**posing_arguments(num_tokens=tokens))
    OPERATIONS["routed"](**decode)
    assert gpu.launched[-1][0].startswith("graph of")


def test_no_array_is_kept_alive(gpu: Gpu) -> None:
    arguments = posing_arguments(dtype="bfloat16")
    for _ in range(3):
        arguments["output"] = OPERATIONS["routed"](**arguments)
    flat = [a for v in arguments.values() for a in (v if isinstance(v, tuple) else (v,))]
    alive = [weakref.ref(a) for a in flat if isinstance(a, Posing)]
    assert len(alive) == 9
    del arguments, flat
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert len(repeated.accepted) > 0


def test_memory_is_bounded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in (repeated.accepted, bound_layer._places):
        monkeypatch.setattr(memory, "max_entries", 3)
    calls = [posing_arguments(num_tokens=tokens) for tokens in range(1, 6)]
    for arguments in calls:
        for _ in range(3):
            OPERATIONS["routed"](**arguments)
    assert len(repeated.accepted) == 3
    assert len(bound_layer._places) == 3
    known = [passes_the_rules(lambda a=a: OPERATIONS["routed"](**a)) for a in reversed(calls)]
    assert known[:3] == [True, True, True]


def test_scratch_of_a_repeated_call_in_a_capture_is_kept(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_captured", kept := [])
    arguments = posing_arguments()
    OPERATIONS["routed"](**arguments)
    gpu.framework.capturing = True
    assert passes_the_rules(lambda: OPERATIONS["routed"](**arguments))
    assert len(kept) == 1


def test_host_arrays_are_not_remembered(gpu: Gpu) -> None:
    """Neither NumPy's nor torch's, whose CUDA tensors are."""
    torch = pytest.importorskip("torch")
    assert describe(torch.zeros(1)).device == HOST
    arguments = on(ArrayKind("torch"), layer_arguments())
    for _ in range(2):
        OPERATIONS["routed"](**arguments)
        OPERATIONS["routed"](**layer_arguments())
    assert len(repeated.accepted) == 0
