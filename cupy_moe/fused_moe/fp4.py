"""Mixture-of-experts layers with FP4 weights and block scales, whole or in two partitions."""

from __future__ import annotations

from cupy_moe.fused_moe.fp4_layers import partitioned_layer, whole_layer
from cupy_moe.fused_moe.repeated import run_again, run_first
from cupy_moe.partitions import MoePartitionResources
from cupy_moe.results import as_list
from cupy_moe.validate import ArrayLike

__all__ = ["prims_ts_fp4_block_scale_moe", "prims_ts_fp4_block_scale_moe_partitioned"]


def prims_ts_fp4_block_scale_moe(
    routing_logits: ArrayLike | None,
    routing_bias: ArrayLike | None,
    hidden_states: ArrayLike,
    hidden_states_scale: ArrayLike | None,
    gemm1_weights: ArrayLike,
    gemm1_weights_scale: ArrayLike,
    gemm1_bias: ArrayLike | None,
    gemm1_alpha: ArrayLike | None,
    gemm1_beta: ArrayLike | None,
    gemm1_clamp_limit: ArrayLike | None,
    gemm2_weights: ArrayLike,
    gemm2_weights_scale: ArrayLike,
    gemm2_bias: ArrayLike | None,
    output1_scale_scalar: ArrayLike,
    output1_scale_gate_scalar: ArrayLike,
    output2_scale_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: ArrayLike | None = None,
    output: ArrayLike | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: ArrayLike | None = None,
    routing_input_mode: int = 0,
    topk_ids: ArrayLike | None = None,
    topk_weights: ArrayLike | None = None,
) -> list[ArrayLike]:
    """Mixture-of-experts layer with FP4 weights, from router logits or given ids.

    The mode follows from the dtype of ``hidden_states``; weights are packed E2M1 in every mode:

    ========  ===============  ===========  ==================  ===================
    mode      hidden_states    its scales   weight scales       intermediate ``y``
    ========  ===============  ===========  ==================  ===================
    NVFP4     uint8 (packed)   E4M3, 16     E4M3, 16            E2M1 with E4M3, 16
    MXFP8     float8_e4m3fn    UE8M0, 32    UE8M0, 32           E4M3 with UE8M0, 32
    BF16      bfloat16         none         UE8M0, 32           BF16
    ========  ===============  ===========  ==================  ===================

    (a scale covers 16 or 32 elements of K). A slot ``(t, k)`` of token ``t`` is live if its expert
    is local, ``O <= id < O + EL``; any other id contributes nothing. For a live slot with local
    expert ``e`` and ``W1``, ``W2`` in logical order (rows ``[0, I)`` of ``W1`` are the up half,
    rows ``[I, 2I)`` the gate half), all values with their block scales::

        u[i] = sum_h x[t, h] * W1[e, i, h]             v[i] = sum_h x[t, h] * W1[e, I + i, h]
        y = quantize(act(u, v), output scale s1[e])    the only rounding on the way
        z[j] = bf16(s2[e] * sum_i y[i] * W2[e, j, i])
        out[t, j] = bf16(sum_k w[t, k] * z_k[j])       over the live slots of t

    with FP32 sums. With ``L`` the limit (default: none), ``u' = clamp(u, -L, L)`` and
    ``v' = min(v, L)``:

    ===  =======  =========================================================================
    activation    ``act(u, v)``
    ------------  -------------------------------------------------------------------------
    3    Swiglu   ``(u' + beta) * (sg * v') * sigmoid(alpha * sg * v')``
    4    Geglu    ``u * (sg * v) * sigmoid(1.702 * sg * v)``
    10   Situ     ``beta * tanh(sg * u' / beta) * alpha * tanh(sg * v' / alpha) * sigmoid(sg * v')``
    ===  =======  =========================================================================

    and, in NVFP4, SwigluStep (7), ``clamp(u, -L, L) * min(sg * v * sigmoid(sg * v), L * sg)`` with
    the default ``L = 7 / sg``.

    ``s1``, ``sg`` and ``s2`` are those of the arguments in NVFP4 and 1 in the other modes.

    Parameters
    ----------
    routing_logits : array, shape (T, E), float32 or bfloat16, or None
        Needed if ``routing_input_mode`` is 0, else None.
    routing_bias : array, shape (E,), bfloat16 or float32, or None
        Added to the keys of DeepSeekV3 and MiniMax2; without effect on given routing.
    hidden_states : array, shape (T, H), or (T, H/2) if packed
        See the table; two E2M1 codes a byte, the even column in the low nibble. H a multiple of
        128. Every other array must be on its device; its library makes the results.
    hidden_states_scale : array, float8_e4m3fn, float8_e8m0fnu or uint8, or None
        Linear: one scale per token and 16 or 32 columns, in any shape. UE8M0 bytes may be typed as
        float8_e4m3fn, E4M3 ones not as float8_e8m0fnu. MXFP8 rows may be padded to
        multiples of 16 scales. None for BF16.
    gemm1_weights, gemm2_weights : array, uint8
        Prepared by `cupy_moe.weights` (`prepare_gemm1_weights`, `prepare_gemm2_weights`): MajorK
        (EL, 2I, H/2) and (EL, H, I/2), or BlockMajorK (EL, K bytes / block, rows, block) with
        the same block of 64 or 128 bytes for both.
    gemm1_weights_scale, gemm2_weights_scale : array, float8_e4m3fn, float8_e8m0fnu or uint8
        One scale per row and 16 or 32 columns in the 128x4 order (`prepare_gemm1_scales`,
        `prepare_gemm2_scales`), in any shape.
    gemm1_bias, gemm2_bias : None
        Not supported.
    gemm1_alpha, gemm1_beta, gemm1_clamp_limit : array, shape (>= EL,), float32, or None
        ``alpha`` (default 1), ``beta`` (default 0 for Swiglu, 1 for Situ) and ``L``, per expert;
        None for Geglu; SwigluStep takes ``L`` only. In units of the raw sums are ``L`` and the
        ``beta`` of Swiglu.
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar : array, (>= EL,), float32
        ``s1``, ``sg`` and ``s2``. With ``d`` the dequantization factor of ``u`` and ``v`` and ``c``
        the quantization factor of ``y``: ``s1 = c * d`` (Situ: ``c``), ``sg = d`` and ``s2`` undoes
        ``c`` and the global scale of ``W2``. Needed, but without effect, outside NVFP4.
    num_experts, top_k : int
        E, experts of all ranks, and K.
    n_group, topk_group : int or None
        Groups of DeepSeekV3.
    intermediate_size : int
        I, a multiple of 128.
    local_expert_offset, local_num_experts : int
        O and EL: the weights are those of experts O to O + EL - 1.
    routed_scaling_factor : float or None
        Factor of the weights of DeepSeekV3 and MiniMax2 from logits.
    routing_method_type : int or RoutingMethodType
    weight_layout : int or WeightLayout
        MajorK (0) or BlockMajorK (2).
    do_finalize : bool
        False returns the rows ``z`` before the weighted sum.
    enable_pdl : bool or None
        Without effect on results.
    activation_type : int or ActivationType
        See the table.
    per_token_scale : None
        Not supported.
    output : array, shape (T, H), bfloat16, or None
        Written and returned if ``do_finalize``, else ignored. Must not overlap any input.
    tune_max_num_tokens : int
        Without effect on results.
    norm_topk_prob : bool
        Whether SigmoidRenorm normalizes.
    routing_replay_out : array, shape (>= T, K), int16, or None
        Receives the ids selected from logits; checked and left as it is with given ids.
    routing_input_mode : int or RoutingInputMode
        0: from ``routing_logits``; ``topk_ids`` and ``topk_weights`` are not looked at. 1: packed
        ``topk_ids``, without ``topk_weights``. 2: ``topk_ids`` and ``topk_weights``.
    topk_ids : array, shape (T, K), int32, or None
        Global ids, or words ``(id << 16) | bits of the BF16 weight``
        (`cupy_moe.weights.pack_topk_ids`).
    topk_weights : array, shape (T, K), bfloat16 or float32, or None
        NVFP4 rounds FP32 weights to BF16. Those of logits are BF16 in every mode.

    Returns
    -------
    [output] : list of one array, shape (T, H), bfloat16
        With ``do_finalize``: ``output`` if given, else a new array.
    [gemm2_output, expert_weights, expanded_idx_to_permuted_idx] : list of three arrays
        Without ``do_finalize``: as of `trtllm_fp8_per_tensor_scale_routed_moe`. The weights are new
        BF16 ones, except that given ``topk_weights`` are handed back if they were used as they are.

    Raises
    ------
    TypeError
        A plain argument is of the wrong kind.
    ValueError
        An array is missing, of another dtype (then also a TypeError) or shape, on another device,
        has gaps, is misaligned (16 bytes for ``hidden_states``, weights and ``output``; scales 32
        in CUDA and 16 in host memory) or overlaps ``output``; a size is out of range or contradicts
        another; an option is given where it has no meaning.
    RuntimeError
        A kernel would have to be loaded during a stream capture: make the call once before.
    NotImplementedError
        Another activation; biases or ``per_token_scale``; more experts or slots than kernels count.

    Warns
    -----
    UserWarning
        Groups are given with Llama4.

    Notes
    -----
    On a GPU all products are exact and sums are FP32. Arrays in host memory run the NumPy
    reference, which computes sums in float64. A token's row does not depend on the other tokens'
    data; an expert that a token names twice counts twice. T = 0 gives empty results.

    A weight times its scale must be in the range of BF16: with UE8M0 byte 253 magnitudes from 4 on,
    with 254 from 2 on, are infinite.

    Name and arguments are those of the operation in FlashInfer.
    """
    arguments = (
        routing_logits,
        routing_bias,
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm1_bias,
        gemm1_alpha,
        gemm1_beta,
        gemm1_clamp_limit,
        gemm2_weights,
        gemm2_weights_scale,
        gemm2_bias,
        output1_scale_scalar,
        output1_scale_gate_scalar,
        output2_scale_scalar,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        routed_scaling_factor,
        routing_method_type,
        weight_layout,
        do_finalize,
        enable_pdl,
        activation_type,
        per_token_scale,
        output,
        tune_max_num_tokens,
        norm_topk_prob,
        routing_replay_out,
        routing_input_mode,
        topk_ids,
        topk_weights,
    )
    key, filled = run_again(whole_layer, arguments)
    return as_list(run_first(key, whole_layer(*arguments)) if filled is None else filled)


def prims_ts_fp4_block_scale_moe_partitioned(
    routing_logits: ArrayLike | None,
    routing_bias: ArrayLike | None,
    topk_ids: ArrayLike | None,
    topk_weights: ArrayLike | None,
    hidden_states: ArrayLike,
    hidden_states_scale: ArrayLike | None,
    gemm1_weights: list[ArrayLike],
    gemm1_weights_scale: list[ArrayLike],
    gemm2_weights: list[ArrayLike],
    gemm2_weights_scale: list[ArrayLike],
    output1_scale_scalar: ArrayLike,
    output1_scale_gate_scalar: ArrayLike,
    output2_scale_scalar: ArrayLike,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    partition_resources: MoePartitionResources,
    partition_strategy: str,
    routed_scaling_factor: float | None = None,
    routing_method_type: int = 0,
    weight_layout: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: ArrayLike | None = None,
    output: ArrayLike | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: ArrayLike | None = None,
    gemm1_alpha: ArrayLike | None = None,
    gemm1_beta: ArrayLike | None = None,
    gemm1_clamp_limit: ArrayLike | None = None,
) -> list[ArrayLike]:
    """FP4 mixture-of-experts layer in two partitions, from router logits or given ids.

    The layer of `prims_ts_fp4_block_scale_moe`, whose formats, formulas and remaining parameters
    hold here, but for SwigluStep. FC1 is split by rows: partition p computes the intermediate
    columns ``[p*I/2, (p+1)*I/2)``. FC2 is split by ``partition_strategy``:

    tp_n_tp_n
        By rows: both partitions read the whole intermediate, partition p computes columns
        ``[p*H/2, (p+1)*H/2)`` of ``z``. The result is that of the whole layer.
    tp_n_tp_k
        Along K: partition p multiplies its own intermediate columns, which gives partial sums of
        the full width, ``z_p = bf16(s2 * sum over its i of y[i] * W2[j, i])``. The two are added in
        FP32, before the routing weight: ``out = bf16(sum_k w_k * (z_0 + z_1))``, and without
        ``do_finalize`` ``bf16(z_0 + z_1)`` is returned.

    Parameters
    ----------
    routing_logits : array, shape (T, E), float32 or bfloat16, or None
        If given, ``topk_ids`` and ``topk_weights`` are not looked at.
    topk_ids : array, shape (T, K), int32, or None
        Ids if ``topk_weights`` are given, else packed words.
    topk_weights : array, shape (T, K), bfloat16 or float32, or None
    gemm1_weights, gemm2_weights : list of two arrays, uint8
        Shards of prepared weights (`cupy_moe.weights.shard_prepared_moe_weights`): MajorK
        (EL, I, H/2) and, of FC2, (EL, H/2, I/2) for tp_n_tp_n or (EL, H, I/4) for tp_n_tp_k; or
        BlockMajorK (EL, K bytes / block, rows, block).
    gemm1_weights_scale, gemm2_weights_scale : list of two arrays
        Their block scales, in any shape.
    partition_resources : MoePartitionResources
        ``MoePartitionResources((None, None))`` for arrays in host memory, where the partitions are
        computed one after the other.
    partition_strategy : {"tp_n_tp_n", "tp_n_tp_k"}
        tp_n_tp_n needs an H that is a multiple of 256; tp_n_tp_k an I that is one, except in
        NVFP4.
    routing_bias, hidden_states, hidden_states_scale, ..., gemm1_clamp_limit
        As in `prims_ts_fp4_block_scale_moe`.

    Returns
    -------
    list of one or three arrays
        As in `prims_ts_fp4_block_scale_moe`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `prims_ts_fp4_block_scale_moe`. Also ``ValueError`` for a strategy or resources that are
        missing or unknown, resources for another device, and lists of other than two shards.

    Warns
    -----
    UserWarning
        Groups are given with Llama4.
    """
    arguments = (
        routing_logits,
        routing_bias,
        topk_ids,
        topk_weights,
        hidden_states,
        hidden_states_scale,
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        output1_scale_scalar,
        output1_scale_gate_scalar,
        output2_scale_scalar,
        num_experts,
        top_k,
        n_group,
        topk_group,
        intermediate_size,
        local_expert_offset,
        local_num_experts,
        partition_resources,
        partition_strategy,
        routed_scaling_factor,
        routing_method_type,
        weight_layout,
        do_finalize,
        enable_pdl,
        activation_type,
        per_token_scale,
        output,
        tune_max_num_tokens,
        norm_topk_prob,
        routing_replay_out,
        gemm1_alpha,
        gemm1_beta,
        gemm1_clamp_limit,
    )
    key, filled = run_again(partitioned_layer, arguments)
    return as_list(run_first(key, partitioned_layer(*arguments)) if filled is None else filled)
