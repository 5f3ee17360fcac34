"""How many blocks of a kernel a whole device holds at once."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from cupy_moe.runtime.devices import check, device_guard, sm_count
from cupy_moe.runtime.launch import ParamLayout, bind
from cupy_moe.runtime.requirements import import_driver

if TYPE_CHECKING:
    from cupy_moe.runtime.jit import Function

__all__ = ["resident_clusters"]


@cache
def resident_clusters(function: Function, cluster: int, block: int, smem: int) -> int:
    """Clusters of ``cluster`` blocks of ``block`` threads that are resident together.

    Parameters
    ----------
    function : Function
    cluster, block : int
    smem : int
        Dynamic shared memory of a block, in bytes.
    """
    driver, what = import_driver(), f"occupancy of {function.name}"
    with device_guard(function.device):
        if cluster == 1:
            blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                function.handle, block, smem
            )
            return int(check(blocks, what)) * sm_count(function.device)
        config = bind(
            function,
            ParamLayout().pack(),
            grid=(cluster, 1, 1),
            block=block,
            smem=smem,
            cluster=cluster,
        ).config
        return int(check(driver.cuOccupancyMaxActiveClusters(function.handle, config), what))
