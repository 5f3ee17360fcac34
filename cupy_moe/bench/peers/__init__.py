"""Other implementations of the layers, each where its package is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.peers.flashinfer import FlashInferCutlass, FlashInferMxfp4
from cupy_moe.bench.peers.humming import Humming, HummingMxfp4Grouped, HummingMxfp4Indexed
from cupy_moe.bench.peers.marlin import Marlin
from cupy_moe.bench.peers.torch_grouped import TorchBf16, TorchGroupedGemm

__all__ = ["FP4_PEERS", "FP8_PEERS", "present_peers"]


def _by_key(*peers: type[Contender]) -> Mapping[str, type[Contender]]:
    return {peer.key: peer for peer in peers}


FP8_PEERS = _by_key(TorchGroupedGemm, Humming, FlashInferCutlass)

# Of BF16 tokens: nobody else has layers of MXFP8 or NVFP4 tokens with this rounding in between.
FP4_PEERS = _by_key(TorchBf16, HummingMxfp4Indexed, HummingMxfp4Grouped, Marlin, FlashInferMxfp4)


def present_peers(
    peers: Iterable[type[Contender]],
) -> tuple[list[type[Contender]], dict[str, str]]:
    """Those that can run here, and by name why the others cannot."""
    present: list[type[Contender]] = []
    missing = {}
    for peer in peers:
        reason = peer.missing()
        if reason is None:
            present.append(peer)
        else:
            missing[peer.name] = reason
    return present, missing
