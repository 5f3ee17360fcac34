"""Choice of the permutation kernel's specialization and grid; needs no GPU."""

from __future__ import annotations

import pytest

from cupy_moe.kernels.permute import (
    MAX_LOCAL_EXPERTS,
    PermuteConfig,
    all_permute_configs,
    permute_config,
)

SLOT_COUNTS = (1, 8, 1024, 1025, 65_536, 1 << 30)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "compute_80")
SHARED_MEMORY = 99 * 1024  # of a block, on every architecture


def choose(num_slots: int, num_experts: int = 256, arch: str = "sm_90a") -> PermuteConfig:
    return permute_config(
        packed_ids=False, num_slots=num_slots, local_num_experts=num_experts, arch=arch
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_slots", SLOT_COUNTS)
def test_choice_is_among_the_listed_and_fits(num_slots: int, arch: str) -> None:
    for num_experts in (1, 256, 512, 513, MAX_LOCAL_EXPERTS):
        config = choose(num_slots, num_experts, arch)
        assert config in all_permute_configs("sm_90a")
        assert config.smem_bytes(num_experts) + 1024 <= SHARED_MEMORY


@pytest.mark.parametrize("arch", ARCHS)
def test_clusters_only_where_the_architecture_has_them(arch: str) -> None:
    has_clusters = arch not in {"sm_80", "sm_86", "sm_89", "compute_80"}
    assert choose(65_536, arch=arch).cluster_size == (8 if has_clusters else 1)
    assert choose(1024, arch=arch).cluster_size == 1


def test_few_slots_take_few_threads() -> None:
    assert choose(1024).num_threads < choose(1025).num_threads


@pytest.mark.parametrize("num_slots", SLOT_COUNTS)
def test_grid_is_a_power_of_two_of_whole_clusters(num_slots: int) -> None:
    for config in all_permute_configs("sm_90a"):
        blocks, y, z = config.grid(num_slots)
        assert (y, z) == (1, 1)
        clusters, rest = divmod(blocks, config.cluster_size)
        assert rest == 0
        assert clusters in {1, 2, 4, 8}
    assert choose(num_slots).grid(num_slots)[0] == 1 or num_slots > 1024


def test_listed_specializations_are_distinct() -> None:
    specs = [config.spec() for config in all_permute_configs("sm_90a")]
    assert len(set(specs)) == len(specs)
