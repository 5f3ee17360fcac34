"""``demo``: one FP8 layer from random weights, and how far quantization moves its output.

The layer has the shape of a small Qwen3-MoE: renormalized top-k routing and SwiGLU experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cupy_moe import weights
from cupy_moe.cli.options import positive
from cupy_moe.cli.output import check_files
from cupy_moe.fused_moe import trtllm_fp8_per_tensor_scale_moe
from cupy_moe.fused_moe.settings import SIZE_MULTIPLE
from cupy_moe.reference.routing import select_experts
from cupy_moe.runtime import require_gpu
from cupy_moe.runtime.compiler import arch_for
from cupy_moe.runtime.devices import compute_capability
from cupy_moe.testing.compare import Errors, compare, to_host
from cupy_moe.testing.inputs import Arguments, Fp8Layer, move_arguments
from cupy_moe.testing.unquantized import unquantized_moe
from cupy_moe.types import ActivationType, RoutingMethodType

__all__ = ["add_parser"]

F32: TypeAlias = NDArray[np.float32]

# E4M3 rounds with a relative RMS error of 2.6 %. Hidden states and FC1 weights put 3.7 % on up and
# on gate, 5.3 % on their product; the intermediate and FC2 weights add theirs: 6.5 % together. Any
# mistake in layout, routing or scales costs 30 % and more.
LARGEST_REL_L2 = 0.10

GPU_REPEATS = 20


@dataclass(frozen=True)
class Model:
    """Random layer and batch in FP32, and the experts that its router selects."""

    x: F32  # (T, H)
    logits: F32  # (T, E)
    w1: F32  # (E, 2I, H), [up; gate]
    w2: F32  # (E, H, I)
    ids: NDArray[np.int32]  # (T, K)
    weights: F32  # (T, K)

    @classmethod
    def random(cls, args: argparse.Namespace) -> Model:
        """Draw standard normal hidden states, and weights that keep their magnitude."""
        rng = np.random.default_rng(args.seed)

        def normal(*shape: int, scale: float = 1.0) -> F32:
            values: F32 = rng.standard_normal(shape, dtype=np.float32)
            values *= np.float32(scale)
            return values

        hidden, intermediate, experts = args.hidden, args.intermediate, args.experts
        logits = normal(args.tokens, experts)
        ids, topk_weights = select_experts(
            logits, None, method=RoutingMethodType.Renormalize, top_k=args.top_k
        )
        return cls(
            x=normal(args.tokens, hidden),
            logits=logits,
            w1=normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
            w2=normal(experts, hidden, intermediate, scale=intermediate**-0.5),
            ids=ids,
            weights=topk_weights,
        )

    @property
    def tokens_per_expert(self) -> NDArray[np.int64]:
        """How many tokens each expert serves."""
        return np.bincount(self.ids.reshape(-1), minlength=self.logits.shape[1])


def quantized_arguments(model: Model) -> Arguments:
    """Quantize and prepare; the result is the call's keyword arguments."""
    hidden_states, input_scale = weights.quantize_activations_fp8(model.x)
    experts = weights.quantize_experts_fp8(
        model.w1,
        model.w2,
        activation_type=ActivationType.Swiglu,
        input_scale=input_scale,
        intermediate_scale=weights.calibrate_intermediate_scale(
            model.x, model.w1, activation_type=ActivationType.Swiglu, topk_ids=model.ids
        ),
    )
    layer = Fp8Layer(experts, ActivationType.Swiglu, num_experts=len(model.w1))
    return layer.logits_arguments(
        hidden_states,
        model.logits,
        top_k=model.ids.shape[1],
        routing_method_type=RoutingMethodType.Renormalize,
    )


# --- backends -------------------------------------------------------------------------------------


def choose_gpu(backend: str, console: Console) -> bool:
    """Whether to run on the GPU; says why not where there was a choice."""
    if backend == "cpu":
        return False
    try:
        require_gpu()
        arch_for(compute_capability(0))  # refuses what is too old
    except RuntimeError as error:
        if backend == "gpu":
            raise
        reason = f"No usable GPU, so the NumPy reference runs: {error}\n"
        console.print(reason, style="yellow", markup=False)  # the reason may name an [extra]
        return False
    return True


def run_on_cpu(arguments: Arguments) -> tuple[Any, str]:
    """Output and how long one call took."""
    start = time.perf_counter()
    out = trtllm_fp8_per_tensor_scale_moe(**arguments)
    return out, f"{time.perf_counter() - start:.2f} s"


def run_on_gpu(arguments: Arguments) -> tuple[Any, str]:
    """Output and the median time of a warm call, launches included."""
    import cupy

    arguments = move_arguments(arguments, "cupy")

    def call() -> Any:
        return trtllm_fp8_per_tensor_scale_moe(**arguments)

    start = time.perf_counter()
    out = call()
    cupy.cuda.get_current_stream().synchronize()
    first = time.perf_counter() - start
    times = [_gpu_microseconds(cupy, call) for _ in range(GPU_REPEATS)]
    return out, f"{np.median(times):.1f} us (first call, with compilation: {first:.2f} s)"


def _gpu_microseconds(cupy: Any, call: Callable[[], Any]) -> float:
    before, after = cupy.cuda.Event(), cupy.cuda.Event()
    before.record()
    call()
    after.record()
    after.synchronize()
    return 1e3 * float(cupy.cuda.get_elapsed_time(before, after))


# --- output ---------------------------------------------------------------------------------------


def report(model: Model, errors: Errors, where: str, duration: str) -> Table:
    """Table of the figures."""
    counts = model.tokens_per_expert
    position = ", ".join(map(str, errors.worst_index))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("backend", where)
    table.add_row("time of a call", duration)
    table.add_row(
        "tokens per expert",
        f"min {counts.min()}, mean {counts.mean():.1f}, max {counts.max()}; "
        f"{(counts == 0).sum()} of {counts.size} experts idle",
    )
    table.add_row("relative L2 error", f"{errors.rel_l2:.4f} against the layer in float64")
    table.add_row("worst row", f"{errors.max_row_rel_l2:.4f} (token {errors.worst_row})")
    table.add_row(
        "worst element",
        f"[{position}]: {errors.worst_out:.4f}, float64 layer {errors.worst_ref:.4f}",
    )
    return table


def plot(path: Path, model: Model, out: NDArray[Any], exact: NDArray[np.float64]) -> None:
    """Draw tokens per expert, and output against the unquantized layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts = model.tokens_per_expert
    left.bar(np.arange(counts.size), counts)
    left.set(xlabel="expert", ylabel="tokens", title="Tokens per expert")
    right.plot(exact.ravel(), out.astype(np.float64).ravel(), ",", alpha=0.5)
    right.axline((0, 0), slope=1, color="black", linewidth=0.5)
    right.set(xlabel="float64 layer", ylabel="FP8 layer", title="Output elements")
    figure.savefig(path, dpi=150)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; the exit code is 1 if the result is further off than FP8 explains."""
    if args.top_k > args.experts:
        raise ValueError(f"--top-k must be at most --experts {args.experts}, got {args.top_k}")
    for size in ("hidden", "intermediate"):
        if getattr(args, size) % SIZE_MULTIPLE:
            raise ValueError(
                f"--{size} must be a multiple of {SIZE_MULTIPLE}, got {getattr(args, size)}"
            )
    check_files(args)
    use_gpu = choose_gpu(args.backend, console)
    console.print(
        f"FP8 MoE layer: {args.tokens} tokens, hidden {args.hidden}, intermediate "
        f"{args.intermediate}, {args.experts} experts, top-{args.top_k}, SwiGLU, seed {args.seed}"
    )
    with console.status("random weights, quantization, preparation"):
        model = Model.random(args)
        arguments = quantized_arguments(model)
    with console.status("running the layer"):
        out, duration = (run_on_gpu if use_gpu else run_on_cpu)(arguments)
    with console.status("the same layer in float64"):
        exact = unquantized_moe(model.x, model.w1, model.w2, model.ids, model.weights)
    errors = compare(out, exact)
    where = "CUDA kernels, CuPy arrays" if use_gpu else "NumPy reference on the CPU"
    console.print(report(model, errors, where, duration))
    if args.plot:
        plot(args.plot, model, to_host(out), exact)
        console.print(f"plot written to {args.plot}")
    if not errors.rel_l2 <= LARGEST_REL_L2:
        console.print(
            f"[red]FP8 rounding explains a relative L2 error of {LARGEST_REL_L2} only.[/]"
        )
        return 1
    return 0


def add_parser(subparsers: Any) -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser("demo", help="run one FP8 layer and compare it with float64")
    for option, default, text in (
        ("--tokens", 64, "tokens of the batch"),
        ("--hidden", 1024, "hidden size, a multiple of 128"),
        ("--intermediate", 384, "intermediate size of an expert, a multiple of 128"),
        ("--experts", 64, "experts of the layer"),
        ("--top-k", 8, "experts of a token"),
    ):
        about = f"{text}; default: {default}"
        parser.add_argument(option, type=positive, default=default, metavar="N", help=about)
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    parser.add_argument(
        "--backend",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="auto (default): the GPU if one is usable",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (matplotlib)")
    parser.set_defaults(run=run)
