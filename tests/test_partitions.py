"""How green partitions are put together from what a driver's split returns, on a simulated GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from cupy_moe.runtime.streams import _split

H200 = (18, 18, 18, 16, 16, 16, 16, 14)  # multiprocessors of each cluster: 15 groups of 8
CORE = SimpleNamespace(SMResourceOptions=lambda count: SimpleNamespace(count=count))


@dataclass(frozen=True)
class Resource:
    """Multiprocessors by their numbers, as ``cuda.core.SMResource`` offers them."""

    sms: frozenset[int]

    @property
    def sm_count(self) -> int:
        return len(self.sms)


class Gpu(Resource):
    """Splits like the driver: groups of whole blocks of 8, none of which crosses a cluster."""

    def __init__(self, clusters: tuple[int, ...], *, refuses: bool = False) -> None:
        super().__init__(frozenset(range(sum(clusters))))
        blocks, first = [], 0
        for size in clusters:
            blocks += [range(at, at + 8) for at in range(first, first + size - 7, 8)]
            first += size
        self.__dict__.update(blocks=blocks, refuses=refuses)

    def split(self, options: Any) -> tuple[list[Resource], Resource]:
        size = options.count[0]
        assert set(options.count) == {size}
        per_group = size // 8
        fitting = len(self.blocks) // per_group
        if self.refuses and fitting < len(options.count):
            raise Exception("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: invalid resource")
        groups = [
            Resource(frozenset().union(*self.blocks[i * per_group : (i + 1) * per_group]))
            for i in range(min(fitting, len(options.count)))
        ]
        return groups, Resource(self.sms.difference(*(group.sms for group in groups)))


@pytest.fixture(params=[False, True], ids=["fewer groups", "refusal"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return Gpu(H200, refuses=request.param)


@pytest.mark.parametrize(
    ("counts", "granted"),
    [
        ((8, 112), (8, 112)),
        ((32, 64), (32, 64)),
        ((16, 16, 32), (16, 16, 32)),
        ((8, 120), (8, 124)),
        ((120, 8), (124, 8)),
        ((16, 80, 32), (16, 84, 32)),
        ((8,) * 16, (12, *(8,) * 15)),
        ((128,), (132,)),
    ],
)
def test_sets_are_disjoint_and_large_enough(
    counts: tuple[int, ...], granted: tuple[int, ...], gpu: Gpu
) -> None:
    sets = [frozenset().union(*(r.sms for r in pieces)) for pieces in _split(CORE, gpu, counts)]
    assert tuple(map(len, sets)) == granted
    assert len(frozenset().union(*sets)) == sum(granted)


def test_too_few_groups_for_all_but_the_largest_set() -> None:
    scattered = Gpu((12,) * 8)  # 96 multiprocessors, 8 groups of 8
    with pytest.raises(ValueError, match="has not enough groups of 8 for sm_counts"):
        _split(CORE, scattered, (8,) * 10)


def test_a_split_that_fails_for_another_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(H200)

    def fail(self: Gpu, options: Any) -> None:
        raise NotImplementedError("needs driver 12.4")

    monkeypatch.setattr(Gpu, "split", fail)
    with pytest.raises(NotImplementedError, match=r"driver 12\.4"):
        _split(CORE, gpu, (8, 120))
