"""The FP8 layer in torch on the GPU with float64 sums: oracle for sizes that NumPy is too slow for.

Written from the definition alone, weight layout included, so that it shares no code with the
package; ``test_fp8_random.py`` holds it against the NumPy backend for every activation.
"""

from __future__ import annotations

from typing import Any

import torch

from cupy_moe.types import ActivationType

E4M3_MAX = 448.0


def routing(topk_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (T, K) int32 and weights (T, K) float64 of packed words or of a tuple."""
    if isinstance(topk_ids, tuple):
        return topk_ids[0], topk_ids[1].double()
    low_halves = (topk_ids & 0xFFFF).to(torch.int32) << 16
    return topk_ids >> 16, low_halves.view(torch.float32).double()


def logical(prepared: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Float64 values of one expert's prepared weights, rows in logical order ([up; gate])."""
    rows = prepared.shape[0]
    row = torch.arange(rows, device=prepared.device)
    if gated:  # feature i of up and gate are neighbours, up first
        row = 2 * (row % (rows // 2)) + row // (rows // 2)
    shuffled = 32 * (row // 32) + 8 * (row % 4) + row % 32 // 4
    return prepared.view(torch.uint8)[shuffled].view(torch.float8_e4m3fn).float().double()


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Tanh form of the GELU."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return x * torch.sigmoid(x)


def swiglu_step(u: torch.Tensor, v: torch.Tensor, sg: float, limit: float) -> torch.Tensor:
    """Up clamped on both sides, gate from above after its SiLU."""
    return u.clamp(-limit, limit) * silu(sg * v).clamp(max=limit * sg)


ACTIVATIONS = {
    ActivationType.Swiglu: lambda u, v, sg, _: u * silu(sg * v),
    ActivationType.Geglu: lambda u, v, sg, _: u * gelu(sg * v),
    ActivationType.SwigluStep: swiglu_step,
    ActivationType.Situ: lambda u, v, sg, _: (
        torch.tanh(sg * u) * torch.tanh(sg * v) * torch.sigmoid(sg * v)
    ),
    ActivationType.Relu2: lambda u, _, sg, __: (sg * u).clamp(min=0) ** 2,
    ActivationType.Identity: lambda u, *_: u,
    ActivationType.Silu: lambda u, _, sg, __: silu(sg * u),
}


def expert_rows(
    arguments: dict[str, Any], local: int, x: torch.Tensor, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """BF16 rows z of the tokens ``x`` (float64) that visit local expert ``local``."""
    activation = ActivationType(arguments["activation_type"])
    sums = x @ logical(arguments["gemm1_weights"][local], gated=activation.is_gated).T
    if input_scale is not None:
        sums = sums * input_scale[:, None]
    u, v = sums.chunk(2, dim=1) if activation.is_gated else (sums, sums)
    sg = float(arguments["output1_scales_gate_scalar"][local])
    clamp = arguments.get("gemm1_clamp_limit")
    limit = 7.0 / sg if clamp is None else float(clamp[local])
    s1 = float(arguments["output1_scales_scalar"][local])
    h = (s1 * ACTIVATIONS[activation](u, v, sg, limit)).float()
    q = h.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float().double()
    s2 = float(arguments["output2_scales_scalar"][local])
    z = s2 * (q @ logical(arguments["gemm2_weights"][local], gated=False).T)
    return z.float().bfloat16()


def fp8_moe(arguments: dict[str, Any], chunk: int = 8192) -> torch.Tensor:
    """Output (T, H) BF16 for the keyword arguments of the routed operation (torch, CUDA).

    An expert's tokens are taken ``chunk`` at a time, which bounds the memory of the float64 copies.
    """
    hidden = arguments["hidden_states"]
    ids, weights = routing(arguments["topk_ids"])
    out = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for local in range(arguments["local_num_experts"]):
        visitors = (ids == arguments["local_expert_offset"] + local).nonzero()
        for token, slot in (part.unbind(1) for part in visitors.split(chunk)):
            weight = weights[token, slot]
            x = hidden.view(torch.uint8)[token].view(torch.float8_e4m3fn).float().double()
            if arguments["use_routing_scales_on_input"]:
                z = expert_rows(arguments, local, x, weight.float().bfloat16().double()).double()
            else:
                z = expert_rows(arguments, local, x, None).double() * weight[:, None]
            out.index_add_(0, token, z)
    return out.float().bfloat16()
