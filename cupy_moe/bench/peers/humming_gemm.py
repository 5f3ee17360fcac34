"""One expert GEMM of Humming, compiled at run time with its own choice of tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_moe.bench.peers.assignments import aligned_order

__all__ = ["HummingGemm", "swiglu"]

# Humming's activation works on ``[a, b]``; here a is up and b is gate.
SWIGLU = "a * b / (1.0f + __expf(-b))"


@dataclass(frozen=True, eq=False)
class HummingGemm:
    """A GEMM with its transformed weights.

    Attributes
    ----------
    config : humming.config.LayerConfig
    tensors : dict of str to torch.Tensor
    input_scale : torch.Tensor (1,), float32, or None
        Static scale of quantized inputs.
    locks : torch.Tensor
        Zeros, which the kernels leave as zeros.
    """

    config: Any
    tensors: dict[str, Any]
    input_scale: Any = None
    locks: Any = field(init=False)

    def __post_init__(self) -> None:
        """Make the locks."""
        import torch

        device = self.tensors["weight"].device
        object.__setattr__(self, "locks", torch.zeros(2048, dtype=torch.int32, device=device))

    @classmethod
    def make(
        cls,
        weight: Any,
        weight_scale: Any,
        weight_format: dict[str, Any],
        *,
        input_format: dict[str, Any] | None = None,
        input_factor: float | None = None,
    ) -> HummingGemm:
        """Transform weights.

        Parameters
        ----------
        weight : torch.Tensor (EL, N, bytes of K)
        weight_scale : torch.Tensor
        weight_format, input_format : dict
            Fields of Humming's schemas; inputs are BF16 if theirs is not given.
        input_factor : float, optional
            The static scale.
        """
        import torch
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        words = weight.view(torch.int32)
        schema = HummingWeightSchema(**weight_format)
        config, tensors = prepare_and_transform_humming_tensors(
            {"weight": words, "weight_scale": weight_scale.contiguous()},
            shape_n=words.shape[1],
            shape_k=words.shape[2] * 32 // schema.b_dtype.num_bits,
            weight_schema=schema,
            input_schema=HummingInputSchema(**input_format) if input_format else None,
            num_experts=words.shape[0],
            torch_dtype=torch.bfloat16,
            device=words.device,
        )
        if input_factor is None:
            return cls(config, tensors)
        return cls(config, tensors, torch.full((1,), input_factor, device=words.device))

    def indexed(
        self, experts: NDArray[np.int32], num_experts: int, slots_per_row: int
    ) -> Callable[[Any], Any]:
        """GEMM that finds its rows by index, ``slots_per_row`` of them for each input row.

        Parameters
        ----------
        experts : numpy.ndarray (R,), int32
            Expert of each output row.
        num_experts, slots_per_row : int

        Returns
        -------
        callable
            From the input (R / slots_per_row, K) to the output (R, N).
        """
        import torch

        tuning = self._tuning(experts.size, "indexed")
        rows, block_experts = aligned_order(experts, num_experts, tuning["block_shape"][0])
        device = self.locks.device
        routing = {
            "sorted_ids": torch.from_numpy(rows).to(device),
            "expert_ids": torch.from_numpy(block_experts).to(device),
            "num_tokens_padded": torch.tensor(rows.size, dtype=torch.int32, device=device),
            "top_k": slots_per_row,
        }
        return self._call("indexed", tuning, routing)

    def grouped(self, counts: NDArray[np.int64]) -> Callable[[Any], Any]:
        """GEMM on rows that are sorted by expert, ``counts`` of them each: (R, K) to (R, N)."""
        import torch

        tuning = self._tuning(int(counts.sum()), "grouped_contiguous")
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        layout = torch.from_numpy(offsets).to(self.locks.device)
        return self._call("grouped_contiguous", tuning, {"expert_layout": layout})

    def _tuning(self, num_rows: int, kind: str) -> dict[str, Any]:
        from humming.tune import get_heuristics_config

        tuning: dict[str, Any] = get_heuristics_config(
            self.config, shape_m=num_rows, gemm_type=kind
        )
        return tuning

    def _call(
        self, kind: str, tuning: dict[str, Any], routing: dict[str, Any]
    ) -> Callable[[Any], Any]:
        from humming.forward import humming_forward

        return lambda x: humming_forward(
            self.config,
            inputs=x,
            input_scale=self.input_scale,
            locks=self.locks,
            compute_config={"gemm_type": kind},
            tuning_config=tuning,
            **self.tensors,
            **routing,
        )


def swiglu(fc2: HummingGemm, fc1_output: Any) -> Any:
    """SwiGLU of ``[up, gate]``, quantized if FC2 wants it: (R, 2I) to (R, I)."""
    from humming.forward import may_process_input

    return may_process_input(
        fc2.config,
        fc1_output,
        token_scales=fc2.input_scale,
        activation_type="binary_split",
        activation_impl=SWIGLU,
    )[0]
