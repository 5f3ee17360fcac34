"""Mixture-of-experts layers in FP8 (E4M3) with one scale per tensor and expert."""

from __future__ import annotations

from cupy_moe.fused_moe.fp8_layers import logits_layer, routed_layer
from cupy_moe.fused_moe.repeated import run_again, run_first
from cupy_moe.validate import ArrayLike

__all__ = ["trtllm_fp8_per_tensor_scale_moe", "trtllm_fp8_per_tensor_scale_routed_moe"]


def trtllm_fp8_per_tensor_scale_routed_moe(
    topk_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    routing_bias: ArrayLike | None,
    hidden_states: ArrayLike,
    gemm1_weights: ArrayLike,
    output1_scales_scalar: ArrayLike,
    output1_scales_gate_scalar: ArrayLike,
    gemm2_weights: ArrayLike,
    output2_scales_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = 3,
    routing_replay_out: ArrayLike | None = None,
    output: ArrayLike | None = None,
    gemm1_clamp_limit: ArrayLike | None = None,
    workspace_buffer: ArrayLike | None = None,
) -> ArrayLike | list[ArrayLike]:
    """FP8 mixture-of-experts layer with given expert ids and weights.

    A slot ``(t, k)`` of token ``t`` is live if its expert is local, ``O <= id < O + EL``; any other
    id contributes nothing. For a live slot with local expert ``e`` and ``W1``, ``W2`` in logical
    order (rows ``[0, I)`` of ``W1`` are the up half, rows ``[I, 2I)`` the gate half)::

        u[i] = sum_h x[t, h] * W1[e, i, h]             v[i] = sum_h x[t, h] * W1[e, I + i, h]
        q[i] = e4m3(act(u[i], v[i]))                   saturating, the only rounding on the way
        z[j] = bf16(s2[e] * sum_i q[i] * W2[e, j, i])
        out[t, j] = bf16(sum_k w[t, k] * z_k[j])       over the live slots of t

    with FP32 sums and ``s1``, ``sg``, ``s2`` the three scale vectors of expert ``e``:

    ===  ==========  ==================================================================
    activation_type  ``act(u, v)``
    ---------------  ------------------------------------------------------------------
    3    Swiglu      ``s1 * u * silu(sg * v)``
    4    Geglu       ``s1 * u * gelu(sg * v)``, tanh form of GELU
    7    SwigluStep  ``s1 * clamp(u, -L, L) * min(silu(sg * v), L * sg)``
    10   Situ        ``s1 * tanh(sg * u) * tanh(sg * v) * sigmoid(sg * v)``
    2    Silu        ``s1 * silu(sg * u)``, not gated
    6    Relu2       ``s1 * max(sg * u, 0)^2``, not gated
    9    Identity    ``s1 * u``, not gated
    ===  ==========  ==================================================================

    Parameters
    ----------
    topk_ids : array, shape (T, K), int32, or tuple of two arrays
        Packed: ``(expert id << 16) | bits of the BF16 weight`` (`cupy_moe.weights.pack_topk_ids`).
        Tuple: int32 ids (T, K) and BF16 or FP32 weights (T, K). Ids are global.
    routing_bias : array, shape (E,), bfloat16 or float32, or None
        Checked, without effect: routing is done.
    hidden_states : array, shape (T, H), float8_e4m3fn
        H a multiple of 128. Every other array must be on its device; its library makes the results.
    gemm1_weights : array, shape (EL, M1, H), float8_e4m3fn
        M1 = 2I for gated activations, else I. Rows prepared by
        `cupy_moe.weights.prepare_gemm1_weights` (interleaved if gated, then shuffled), K (= H)
        contiguous.
    output1_scales_scalar : array, shape (EL,), float32
        ``s1``. With ``d`` the dequantization factor of ``u`` and ``v`` and ``c`` the quantization
        factor of ``q``: ``c * d`` for Swiglu, Geglu, SwigluStep and Identity, else ``c``.
    output1_scales_gate_scalar : array, shape (EL,), float32
        ``sg``, the factor ``d``.
    gemm2_weights : array, shape (EL, H, I), float8_e4m3fn
        Rows prepared by `cupy_moe.weights.prepare_gemm2_weights` (shuffled), K (= I) contiguous.
    output2_scales_scalar : array, shape (EL,), float32
        ``s2``, which undoes ``c`` and the scale of ``W2``.
    num_experts : int
        E, experts of all ranks.
    top_k : int
        K, 1 to E.
    n_group, topk_group : int or None
        Without effect; DeepSeekV3 with ``n_group > 1`` needs ``topk_group <= 4`` and ``K <= 22``.
    intermediate_size : int
        I, a multiple of 128.
    local_expert_offset, local_num_experts : int
        O and EL: the weights are those of experts O to O + EL - 1.
    routed_scaling_factor : float or None
        Without effect: weights are used as given.
    use_routing_scales_on_input : bool
        Llama4 only: multiply ``u`` and ``v`` by the weight, rounded to BF16, instead of ``z``.
    routing_method_type : int or RoutingMethodType
        0 to 9; only Llama4 (3) matters, which needs K = 1.
    do_finalize : bool
        False returns the rows ``z`` before the weighted sum.
    enable_pdl : bool or None
        Programmatic dependent launch; None is on where the GPU has it (compute capability 9.0).
        Without effect on results.
    tune_max_num_tokens : int
        Without effect on results.
    activation_type : int or ActivationType
        See the table.
    routing_replay_out : array, shape (>= T, K), int16, or None
        Checked and left as it is: the ids are the caller's.
    output : array, shape (T, H), bfloat16, or None
        Written and returned if ``do_finalize``, else ignored. Must not overlap any input.
    gemm1_clamp_limit : array, shape (EL,), float32, or None
        ``L`` of SwigluStep in units of ``u`` (the physical limit divided by ``sg``); None is
        ``7 / sg``.
    workspace_buffer : array, 1-D, uint8 or int8, or None
        Scratch memory to use before allocating, aligned to 256 bytes. Needs ``do_finalize``.

    Returns
    -------
    output : array, shape (T, H), bfloat16
        With ``do_finalize``: ``output`` if given, else a new array.
    [gemm2_output, expert_weights, expanded_idx_to_permuted_idx] : list of three arrays
        Without ``do_finalize``. ``z`` by permuted rows, (C, H) bfloat16: sorted by local expert,
        each expert's rows padded to whole tiles; unused rows are not initialized. The weights
        (T, K): new BF16 ones of packed input, else the caller's array. The row of each slot,
        int32 (T * K,): entry ``t * K + k``, -1 where the slot is not live.

    Raises
    ------
    TypeError
        An argument is of the wrong kind or dtype.
    ValueError
        A size is out of range or contradicts another; an array has the wrong shape, lies on
        another device, has gaps, is misaligned (16 bytes for ``hidden_states``, the weights and
        ``output``) or overlaps ``output``; an option is given where it has no meaning.
    NotImplementedError
        ``hidden_states`` in float16 or bfloat16, or a GPU older than compute capability 8.0.
    RuntimeError
        A package that CUDA arrays need is missing.

    Notes
    -----
    CUDA arrays: work is enqueued on the current stream of the library of ``hidden_states``, without
    synchronization. The call can be captured into a CUDA graph after one eager call with the same
    shapes has compiled the kernels; a replay follows new ids, weights and data. Launches that share
    a ``workspace_buffer`` must be ordered.

    The result is bitwise reproducible and a token's row does not depend on the other tokens' data:
    rows of an expert are ordered by ``t * K + k`` and sums have a fixed order. An expert that a
    token names twice counts twice. NaN and infinities stay in the rows of their token. T = 0 gives
    empty results.

    Arrays in host memory run the NumPy reference, which computes sums in float64.

    Name and arguments are those of the operation in FlashInfer.
    """
    arguments = (
        topk_ids,
        routing_bias,
        hidden_states,
        gemm1_weights,
        output1_scales_scalar,
        output1_scales_gate_scalar,
        gemm2_weights,
        output2_scales_scalar,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        routed_scaling_factor,
        use_routing_scales_on_input,
        routing_method_type,
        do_finalize,
        enable_pdl,
        tune_max_num_tokens,
        activation_type,
        routing_replay_out,
        output,
        gemm1_clamp_limit,
        workspace_buffer,
    )
    key, filled = run_again(routed_layer, arguments)
    return run_first(key, routed_layer(*arguments)) if filled is None else filled


def trtllm_fp8_per_tensor_scale_moe(
    routing_logits: ArrayLike,
    routing_bias: ArrayLike | None,
    hidden_states: ArrayLike,
    gemm1_weights: ArrayLike,
    output1_scales_scalar: ArrayLike,
    output1_scales_gate_scalar: ArrayLike,
    gemm2_weights: ArrayLike,
    output2_scales_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    use_routing_scales_on_input: bool,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    tune_max_num_tokens: int = 8192,
    activation_type: int = 3,
    norm_topk_prob: bool = True,
    routing_replay_out: ArrayLike | None = None,
    output: ArrayLike | None = None,
    gemm1_clamp_limit: ArrayLike | None = None,
    workspace_buffer: ArrayLike | None = None,
) -> ArrayLike | list[ArrayLike]:
    """FP8 mixture-of-experts layer that selects the experts from router logits.

    Selects ``top_k`` experts of every token by ``routing_method_type``, ties to the smaller id,
    then computes what `trtllm_fp8_per_tensor_scale_routed_moe` computes for these ids and weights.
    With ``x`` the logits, ``b`` the bias and ``f`` the scaling factor:

    ===  ================  =====================  ===========================================
    routing_method_type    key of the selection   weight, rounded to BF16
    ---------------------  ---------------------  -------------------------------------------
    0    Default           ``softmax(x)``         ``softmax(x)`` over all experts
    1,4  Renormalize       ``x``                  softmax over the selected logits
    2    DeepSeekV3        ``sigmoid(x) + b``     ``f * sigmoid(x) / sum of the selected``
    3    Llama4            ``x``, one expert      ``sigmoid(x)``
    5    TopK              ``x``                  ``x``
    6    SigmoidRenorm     ``sigmoid(x)``         ``sigmoid(x) / sum of the selected``
    7    MiniMax2          ``sigmoid(x) + b``     ``f * sigmoid(x) / sum of the selected``
    8    Sigmoid           ``sigmoid(x)``         ``sigmoid(x)``
    9    TopKSigmoid       ``x``                  ``sigmoid(x)``
    ===  ================  =====================  ===========================================

    DeepSeekV3 with ``n_group > 1`` selects within the ``topk_group`` groups of consecutive experts
    whose two largest keys have the largest sums, and rounds the bias to BF16.

    Parameters
    ----------
    routing_logits : array, shape (T, E), float32 or bfloat16
        Scores of all experts, local or not.
    routing_bias : array, shape (E,), bfloat16 or float32, or None
        ``b`` of DeepSeekV3 and MiniMax2, None for zeros; for selection only, never in a weight.
        Checked, without effect for the other methods.
    hidden_states, gemm1_weights, output1_scales_scalar, output1_scales_gate_scalar : array
        As for `trtllm_fp8_per_tensor_scale_routed_moe`.
    gemm2_weights, output2_scales_scalar : array
        Likewise.
    num_experts : int
        E, at most 2048.
    top_k : int
        K, 1 to min(E, 32).
    n_group, topk_group : int or None
        Groups of DeepSeekV3; None, 0 or 1 is ungrouped. Grouped: ``n_group <= 8`` divides E,
        2 to 32 experts a group, ``E % 4 == 0``, ``topk_group`` in [1, min(4, n_group)],
        ``K <= 22`` and K at most the experts of ``topk_group`` groups.
        Ignored by the other methods, with a warning by Llama4.
    intermediate_size, local_expert_offset, local_num_experts : int
        As for `trtllm_fp8_per_tensor_scale_routed_moe`.
    routed_scaling_factor : float or None
        ``f`` of DeepSeekV3 and MiniMax2, None for 1; without effect for the other methods.
    use_routing_scales_on_input : bool
        Llama4 only: multiply ``u`` and ``v`` by the weight instead of ``z``.
    routing_method_type : int or RoutingMethodType
        See the table; Llama4 needs K = 1.
    do_finalize, enable_pdl, tune_max_num_tokens, activation_type
        As for `trtllm_fp8_per_tensor_scale_routed_moe`.
    norm_topk_prob : bool
        False makes SigmoidRenorm equal to Sigmoid; without effect for the other methods.
    routing_replay_out : array, shape (>= T, K), int16, or None
        Row ``t`` receives the ids selected for token ``t``, in the order of the weights, local or
        not; rows from T on are left as they are.
    output, gemm1_clamp_limit, workspace_buffer : array or None
        As for `trtllm_fp8_per_tensor_scale_routed_moe`.

    Returns
    -------
    output : array, shape (T, H), bfloat16
        With ``do_finalize``: ``output`` if given, else a new array.
    [gemm2_output, expert_weights, expanded_idx_to_permuted_idx] : list of three arrays
        Without ``do_finalize``, as for `trtllm_fp8_per_tensor_scale_routed_moe`; the weights are
        a new BF16 array (T, K).

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As for `trtllm_fp8_per_tensor_scale_routed_moe`, and for the limits above.
    NotImplementedError
        Also for more than 2048 experts.

    Warns
    -----
    UserWarning
        Groups are given with Llama4.

    Notes
    -----
    Streams, CUDA graphs, reproducibility and workspace as for
    `trtllm_fp8_per_tensor_scale_routed_moe`. A token with NaN logits is routed to experts in
    [0, E), which ones is not specified.

    Name and arguments are those of the operation in FlashInfer; versions without ``do_finalize``
    take ``enable_pdl`` at its place, so pass the optional arguments by name.
    """
    arguments = (
        routing_logits,
        routing_bias,
        hidden_states,
        gemm1_weights,
        output1_scales_scalar,
        output1_scales_gate_scalar,
        gemm2_weights,
        output2_scales_scalar,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        routed_scaling_factor,
        use_routing_scales_on_input,
        routing_method_type,
        do_finalize,
        enable_pdl,
        tune_max_num_tokens,
        activation_type,
        norm_topk_prob,
        routing_replay_out,
        output,
        gemm1_clamp_limit,
        workspace_buffer,
    )
    key, filled = run_again(logits_layer, arguments)
    return run_first(key, logits_layer(*arguments)) if filled is None else filled
