"""Other implementations of the layer, each where its package is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cupy_moe.bench.contenders import Contender
from cupy_moe.bench.peers.flashinfer import FlashInferCutlass
from cupy_moe.bench.peers.humming import Humming
from cupy_moe.bench.peers.torch_grouped import TorchGroupedGemm

__all__ = ["PEERS", "present_peers"]

PEERS: Mapping[str, type[Contender]] = {
    peer.key: peer for peer in (TorchGroupedGemm, Humming, FlashInferCutlass)
}


def present_peers(keys: Iterable[str]) -> tuple[list[type[Contender]], dict[str, str]]:
    """Peers that can run here, and by name why the others cannot."""
    present: list[type[Contender]] = []
    missing = {}
    for peer in (PEERS[key] for key in keys):
        reason = peer.missing()
        if reason is None:
            present.append(peer)
        else:
            missing[peer.name] = reason
    return present, missing
