"""The binary interface of libepmoe as ctypes sees it. Written by make_abi.py from epmoe.h: change that, not this."""

from ctypes import (CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t,
                    c_uint64, c_void_p)

# epmoe_status_t
EPMOE_OK = 0
EPMOE_ERROR_INVALID_ARGUMENT = 1
EPMOE_ERROR_NOT_SUPPORTED = 2
EPMOE_ERROR_OUT_OF_MEMORY = 3
EPMOE_ERROR_IO = 4
EPMOE_ERROR_FORMAT = 5
EPMOE_ERROR_MISMATCH = 6
EPMOE_ERROR_CAPACITY = 7
EPMOE_ERROR_TIMEOUT = 8
EPMOE_ERROR_PEER = 9
EPMOE_ERROR_TRANSPORT = 10
EPMOE_ERROR_CUDA = 11
EPMOE_ERROR_BAD_STATE = 12
EPMOE_ERROR_INTERNAL = 13

# epmoe_log_level_t
EPMOE_LOG_WARNING = 1
EPMOE_LOG_INFO = 2

# epmoe_dtype_t
EPMOE_DTYPE_NONE = 0
EPMOE_F32 = 1
EPMOE_BF16 = 2
EPMOE_F16 = 3
EPMOE_F8_E4M3 = 4
EPMOE_F8_E8M0 = 5
EPMOE_U8 = 6
EPMOE_I32 = 7
EPMOE_I64 = 8

# epmoe_backend_t
EPMOE_BACKEND_AUTO = 0
EPMOE_BACKEND_CPU = 1
EPMOE_BACKEND_CUDA = 2

# epmoe_scoring_t
EPMOE_SCORING_SOFTMAX = 0
EPMOE_SCORING_SIGMOID = 1
EPMOE_SCORING_SQRT_SOFTPLUS = 2
EPMOE_SCORING_TOPK_SOFTMAX = 3
EPMOE_SCORING_SPARSE_MIXER = 4

# epmoe_group_score_t
EPMOE_GROUP_SCORE_TOP2 = 0
EPMOE_GROUP_SCORE_MAX = 1

# epmoe_activation_t
EPMOE_ACTIVATION_SILU = 0
EPMOE_ACTIVATION_GELU = 1
EPMOE_ACTIVATION_GELU_TANH = 2
EPMOE_ACTIVATION_SWIGLU_OAI = 3
EPMOE_ACTIVATION_NONE = 4
EPMOE_ACTIVATION_SIGMOID = 5

# epmoe_format_t
EPMOE_FORMAT_NONE = 0
EPMOE_FORMAT_F32 = 1
EPMOE_FORMAT_BF16 = 2
EPMOE_FORMAT_F16 = 3
EPMOE_FORMAT_FP8_BLOCK = 4
EPMOE_FORMAT_GPTQ = 5
EPMOE_FORMAT_AWQ = 6
EPMOE_FORMAT_CT_W4 = 7
EPMOE_FORMAT_MXFP4 = 8
EPMOE_FORMAT_W4 = 9

# epmoe_layout_t
EPMOE_LAYOUT_GATE_FIRST = 0
EPMOE_LAYOUT_INTERLEAVED = 1
EPMOE_LAYOUT_PACKED = 2

# epmoe_storage_t
EPMOE_STORAGE_ROWS = 0
EPMOE_STORAGE_TILES = 1

# epmoe_granularity_t
EPMOE_GRANULARITY_TENSOR = 1
EPMOE_GRANULARITY_TOKEN = 2
EPMOE_GRANULARITY_BLOCK128 = 3

# epmoe_rope_style_t
EPMOE_ROPE_NEOX = 0
EPMOE_ROPE_GPTJ = 1

# epmoe_rope_scaling_t
EPMOE_ROPE_SCALING_NONE = 0
EPMOE_ROPE_SCALING_LINEAR = 1
EPMOE_ROPE_SCALING_LLAMA3 = 2
EPMOE_ROPE_SCALING_YARN = 3

# epmoe_cache_layout_t
EPMOE_CACHE_LAYOUT_V1 = 0
EPMOE_CACHE_LAYOUT_NHD = 1
EPMOE_CACHE_LAYOUT_HND = 2

# epmoe_transport_t
EPMOE_TRANSPORT_AUTO = 0
EPMOE_TRANSPORT_LOCAL = 1
EPMOE_TRANSPORT_MPI = 2
EPMOE_TRANSPORT_NCCL = 3
EPMOE_TRANSPORT_P2P = 4

# epmoe_stage_t
EPMOE_STAGE_ROUTER = 0
EPMOE_STAGE_ALIGN = 1
EPMOE_STAGE_DISPATCH = 2
EPMOE_STAGE_GEMM1 = 3
EPMOE_STAGE_ACT = 4
EPMOE_STAGE_GEMM2 = 5
EPMOE_STAGE_COMBINE = 6
EPMOE_STAGE_SHARED = 7
EPMOE_STAGE_ATTENTION = 8
EPMOE_STAGE_COUNT = 9

# epmoe_attention_kind_t
EPMOE_ATTENTION_GQA = 0
EPMOE_ATTENTION_MLA = 1

# epmoe_qk_norm_t
EPMOE_QK_NORM_NONE = 0
EPMOE_QK_NORM_HEAD = 1
EPMOE_QK_NORM_ALL_HEADS = 2
EPMOE_QK_NORM_HEAD_UNWEIGHTED = 3

epmoe_log_fn = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class epmoe_weight_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("format", c_int32),
        ("group_size", c_int32),
        ("zero_convention", c_int32),
        ("scales_dtype", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("g_idx", c_void_p),
        ("storage", c_int32),
        ("group_rows", c_int32),
    ]


class epmoe_topk_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("logits_dtype", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("selection_bias", c_void_p),
        ("scoring", c_int32),
        ("renormalize", c_int32),
        ("scale", c_float),
        ("n_group", c_int32),
        ("topk_group", c_int32),
        ("group_score", c_int32),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("num_tokens_dev", c_void_p),
        ("jitter", c_float),
    ]


class epmoe_align_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("num_experts", c_int32),
        ("block_size", c_int32),
        ("ids", c_void_p),
        ("expert_map", c_void_p),
        ("sorted_ids", c_void_p),
        ("expert_ids", c_void_p),
        ("num_post_padded", c_void_p),
        ("expert_offsets", c_void_p),
        ("num_tokens_dev", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    ]


class epmoe_permute_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("x", c_void_p),
        ("sorted_ids", c_void_p),
        ("num_rows", c_void_p),
        ("max_rows", c_int32),
        ("y", c_void_p),
        ("inverse", c_void_p),
    ]


class epmoe_unpermute_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("y", c_void_p),
        ("max_rows", c_int32),
        ("inverse", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
    ]


class epmoe_grouped_gemm_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_experts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("max_rows", c_int32),
        ("expert_offsets", c_void_p),
        ("row_index", c_void_p),
        ("num_slots", c_int32),
        ("x_row_divisor", c_int32),
        ("x_dtype", c_int32),
        ("x", c_void_p),
        ("weight", epmoe_weight_t),
        ("layout", c_int32),
        ("bias", c_void_p),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("row_weights", c_void_p),
        ("weight_on_input", c_int32),
        ("batch_invariant", c_int32),
        ("y_dtype", c_int32),
        ("y", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("num_rows_dev", c_void_p),
        ("x_sorted", c_int32),
        ("y_sorted", c_int32),
        ("fp8_activations", c_int32),
        ("x_quant", c_int32),
        ("x_scale", c_void_p),
    ]


class epmoe_silu_and_mul_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("width", c_int32),
        ("dtype", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("quant", c_int32),
        ("static_scale", c_void_p),
        ("scale", c_void_p),
    ]


class epmoe_sum_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int32),
        ("y_dtype", c_int32),
        ("out_dtype", c_int32),
        ("y", c_void_p),
        ("weights", c_void_p),
        ("ids", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("addend", c_void_p),
        ("num_tokens_dev", c_void_p),
    ]


class epmoe_experts_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("num_experts", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("dtype", c_int32),
        ("y_dtype", c_int32),
        ("x", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("gate_up", epmoe_weight_t),
        ("down", epmoe_weight_t),
        ("layout", c_int32),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("weight_on_input", c_int32),
        ("y", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("addend", c_void_p),
        ("residual", c_void_p),
        ("num_tokens_dev", c_void_p),
        ("fp8_activations", c_int32),
    ]


class epmoe_quantize_fp8_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("granularity", c_int32),
        ("pow2", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("static_scale", c_void_p),
        ("scale_ub", c_void_p),
        ("q", c_void_p),
        ("scale", c_void_p),
    ]


class epmoe_dequant_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_experts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("reserved", c_int32),
        ("weight", epmoe_weight_t),
        ("w", c_void_p),
    ]


class epmoe_pack_tiles_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_experts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("gated", c_int32),
        ("reserved", c_int32),
        ("weight", epmoe_weight_t),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
    ]


class epmoe_pack_tiles_size_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("data_bytes", c_int64),
        ("scales_bytes", c_int64),
        ("zeros_bytes", c_int64),
        ("tiles", epmoe_weight_t),
    ]


class epmoe_rms_norm_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("hidden", c_int32),
        ("dtype", c_int32),
        ("weight_dtype", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("eps", c_float),
        ("weight_offset", c_int32),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("quant", c_int32),
        ("static_scale", c_void_p),
        ("scale", c_void_p),
        ("y_dtype", c_int32),
    ]


class epmoe_linear_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("x_dtype", c_int32),
        ("y_dtype", c_int32),
        ("x", c_void_p),
        ("x_scale", c_void_p),
        ("weight", epmoe_weight_t),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("x_quant", c_int32),
        ("reserved", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    ]


class epmoe_rope_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("style", c_int32),
        ("inverse", c_int32),
        ("dtype", c_int32),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("k", c_void_p),
        ("k_stride", c_int64),
        ("head_stride", c_int64),
        ("positions_dtype", c_int32),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("num_positions", c_int32),
    ]


class epmoe_qk_norm_rope_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("style", c_int32),
        ("dtype", c_int32),
        ("weight_dtype", c_int32),
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("q_weight", c_void_p),
        ("k_weight", c_void_p),
        ("eps", c_float),
        ("weight_offset", c_int32),
        ("positions_dtype", c_int32),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("num_positions", c_int32),
    ]


class epmoe_rope_table_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_positions", c_int32),
        ("rotary_dim", c_int32),
        ("base", c_double),
        ("scaling", c_int32),
        ("original_positions", c_int32),
        ("factor", c_double),
        ("low_freq_factor", c_double),
        ("high_freq_factor", c_double),
        ("beta_fast", c_double),
        ("beta_slow", c_double),
        ("attention_factor", c_double),
        ("mscale", c_double),
        ("mscale_all_dim", c_double),
        ("no_truncate", c_int32),
        ("cos_sin", c_void_p),
    ]


class epmoe_cache_write_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("layout", c_int32),
        ("key_pack", c_int32),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("key", c_void_p),
        ("key_stride", c_int64),
        ("value", c_void_p),
        ("value_stride", c_int64),
        ("slots_dtype", c_int32),
        ("slots", c_void_p),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
    ]


class epmoe_attention_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("value_dim", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("max_blocks", c_int32),
        ("dtype", c_int32),
        ("cache_dtype", c_int32),
        ("layout", c_int32),
        ("key_pack", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("key_block_stride", c_int64),
        ("value_block_stride", c_int64),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("block_table", c_void_p),
        ("seq_lens", c_void_p),
        ("query_start", c_void_p),
        ("sinks", c_void_p),
        ("o", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
    ]


class epmoe_sample_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("logits_dtype", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("uniform", c_void_p),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("temperature_rows", c_void_p),
        ("top_k_rows", c_void_p),
        ("top_p_rows", c_void_p),
        ("min_p_rows", c_void_p),
        ("tokens", c_void_p),
    ]


class epmoe_spec_verify_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_rows", c_int32),
        ("num_drafts", c_int32),
        ("vocab_size", c_int32),
        ("draft_ids", c_void_p),
        ("draft_probs", c_void_p),
        ("target_probs", c_void_p),
        ("uniform", c_void_p),
        ("tokens", c_void_p),
        ("accepted", c_void_p),
    ]


class epmoe_segment_t(Structure):
    _fields_ = [
        ("peer", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
        ("bytes", c_int64),
    ]


class epmoe_bootstrap_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("ctx", c_void_p),
        ("all_gather", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_double, c_void_p)),
        ("exchange_begin", CFUNCTYPE(c_int32, c_void_p, POINTER(epmoe_segment_t), c_int32, POINTER(epmoe_segment_t), c_int32)),
        ("exchange_finish", CFUNCTYPE(c_int32, c_void_p, c_double, c_void_p)),
        ("release", CFUNCTYPE(None, c_void_p, c_int32)),
    ]


class epmoe_comm_config_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("transport", c_int32),
        ("backend", c_int32),
        ("device", c_int32),
        ("timeout_s", c_double),
        ("nccl_comm", c_void_p),
    ]


class epmoe_ep_config_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("hidden", c_int32),
        ("max_tokens", c_int32),
        ("dtype", c_int32),
        ("wire_dtype", c_int32),
        ("capacity", c_int64),
        ("comm_sms", c_int32),
        ("placement", c_void_p),
        ("num_physical", c_int32),
        ("transport", c_int32),
    ]


class epmoe_dispatch_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int32),
        ("reuse_routing", c_int32),
        ("x", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("num_tokens_dev", c_void_p),
        ("max_rank_tokens", c_int32),
        ("expert_load", c_void_p),
    ]


class epmoe_dispatch_result_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("max_rows", c_int32),
        ("reserved", c_int32),
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("y", c_void_p),
    ]


class epmoe_combine_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("shared", c_void_p),
        ("residual", c_void_p),
        ("y", c_void_p),
    ]


class epmoe_layer_config_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("renormalize", c_int32),
        ("routed_scale", c_float),
        ("n_group", c_int32),
        ("topk_group", c_int32),
        ("group_score", c_int32),
        ("router_has_bias", c_int32),
        ("has_selection_bias", c_int32),
        ("weight_on_input", c_int32),
        ("activation", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
        ("expert_has_bias", c_int32),
        ("shared_intermediate", c_int32),
        ("shared_gated", c_int32),
        ("dtype", c_int32),
        ("weight_format", c_int32),
        ("max_tokens", c_int32),
        ("capacity", c_int64),
        ("weight_group", c_int32),
        ("fp8_activations", c_int32),
        ("router_jitter", c_float),
        ("wire_dtype", c_int32),
        ("placement", c_void_p),
        ("num_physical", c_int32),
        ("transport", c_int32),
        ("comm_sms", c_int32),
    ]


class epmoe_checkpoint_info_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("family", c_char * 32),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("num_experts", c_int32),
        ("num_shards", c_int32),
        ("total_bytes", c_int64),
    ]


class epmoe_layer_memory_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("first_expert", c_int32),
        ("local_experts", c_int32),
        ("weight_bytes", c_int64),
        ("workspace_bytes", c_int64),
        ("comm_bytes", c_int64),
    ]


class epmoe_layer_weights_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("router_dtype", c_int32),
        ("router", c_void_p),
        ("router_bias", c_void_p),
        ("selection_bias", c_void_p),
        ("layout", c_int32),
        ("gate_up", epmoe_weight_t),
        ("down", epmoe_weight_t),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("shared_gate_up", epmoe_weight_t),
        ("shared_down", epmoe_weight_t),
        ("shared_gate", c_void_p),
    ]


class epmoe_load_options_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("progress", CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64)),
        ("progress_ctx", c_void_p),
        ("tp_rank", c_int32),
        ("tp_size", c_int32),
    ]


class epmoe_forward_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int32),
        ("max_rank_tokens", c_int32),
        ("x", c_void_p),
        ("y", c_void_p),
        ("residual", c_void_p),
        ("num_tokens_dev", c_void_p),
        ("logits", c_void_p),
        ("logits_out", c_void_p),
        ("ids_out", c_void_p),
        ("weights_out", c_void_p),
        ("stage_us", c_void_p),
        ("stage_events", POINTER(c_void_p)),
        ("expert_load", c_void_p),
    ]


class epmoe_decoder_config_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("attention", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("q_latent", c_int32),
        ("kv_latent", c_int32),
        ("nope_dim", c_int32),
        ("rope_dim", c_int32),
        ("value_dim", c_int32),
        ("in_bias", c_int32),
        ("out_bias", c_int32),
        ("qk_norm", c_int32),
        ("has_sinks", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("norm_eps", c_float),
        ("latent_eps", c_float),
        ("rope_style", c_int32),
        ("rope", epmoe_rope_table_args_t),
        ("cache_layout", c_int32),
        ("key_pack", c_int32),
        ("cache_dtype", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("max_seqs", c_int32),
        ("no_rope", c_int32),
    ]


class epmoe_decoder_forward_args_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("x", c_void_p),
        ("y", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("max_blocks", c_int32),
        ("num_blocks", c_int32),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("logits_out", c_void_p),
        ("ids_out", c_void_p),
        ("weights_out", c_void_p),
        ("logits", c_void_p),
        ("stage_us", c_void_p),
        ("stage_events", POINTER(c_void_p)),
        ("max_rank_tokens", c_int32),
        ("expert_load", c_void_p),
    ]


class epmoe_head_config_t(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("hidden", c_int32),
        ("vocab_size", c_int32),
        ("norm_eps", c_float),
        ("dtype", c_int32),
        ("max_tokens", c_int32),
        ("backend", c_int32),
    ]


# name: (result, parameters)
FUNCTIONS = {
    "epmoe_status_string": (c_char_p, [c_int32]),
    "epmoe_last_error": (c_char_p, []),
    "epmoe_set_last_error": (c_int32, [c_int32, c_char_p]),
    "epmoe_version": (c_int32, []),
    "epmoe_set_log": (None, [epmoe_log_fn, c_void_p]),
    "epmoe_dtype_string": (c_char_p, [c_int32]),
    "epmoe_dtype_size": (c_int32, [c_int32]),
    "epmoe_backend_resolve": (c_int32, [c_int32, c_void_p]),
    "epmoe_backend_arch": (c_char_p, [c_int32]),
    "epmoe_format_string": (c_char_p, [c_int32]),
    "epmoe_topk": (c_int32, [POINTER(epmoe_topk_args_t), c_void_p]),
    "epmoe_align_max_padded": (c_int64, [c_int32, c_int32, c_int32, c_int32]),
    "epmoe_align_workspace_size": (c_int32, [POINTER(epmoe_align_args_t), c_void_p]),
    "epmoe_align_block_size": (c_int32, [POINTER(epmoe_align_args_t), c_void_p]),
    "epmoe_permute": (c_int32, [POINTER(epmoe_permute_args_t), c_void_p]),
    "epmoe_unpermute": (c_int32, [POINTER(epmoe_unpermute_args_t), c_void_p]),
    "epmoe_grouped_gemm_workspace_size": (c_int32, [POINTER(epmoe_grouped_gemm_args_t), c_void_p]),
    "epmoe_grouped_gemm": (c_int32, [POINTER(epmoe_grouped_gemm_args_t), c_void_p]),
    "epmoe_silu_and_mul": (c_int32, [POINTER(epmoe_silu_and_mul_args_t), c_void_p]),
    "epmoe_sum": (c_int32, [POINTER(epmoe_sum_args_t), c_void_p]),
    "epmoe_experts_workspace_size": (c_int32, [POINTER(epmoe_experts_args_t), c_void_p]),
    "epmoe_experts": (c_int32, [POINTER(epmoe_experts_args_t), c_void_p]),
    "epmoe_quantize_fp8": (c_int32, [POINTER(epmoe_quantize_fp8_args_t), c_void_p]),
    "epmoe_dequant": (c_int32, [POINTER(epmoe_dequant_args_t), c_void_p]),
    "epmoe_pack_tiles_size": (c_int32, [POINTER(epmoe_pack_tiles_args_t), POINTER(epmoe_pack_tiles_size_t)]),
    "epmoe_pack_tiles": (c_int32, [POINTER(epmoe_pack_tiles_args_t), c_void_p]),
    "epmoe_rms_norm": (c_int32, [POINTER(epmoe_rms_norm_args_t), c_void_p]),
    "epmoe_linear_workspace_size": (c_int32, [POINTER(epmoe_linear_args_t), c_void_p]),
    "epmoe_linear": (c_int32, [POINTER(epmoe_linear_args_t), c_void_p]),
    "epmoe_rope": (c_int32, [POINTER(epmoe_rope_args_t), c_void_p]),
    "epmoe_qk_norm_rope": (c_int32, [POINTER(epmoe_qk_norm_rope_args_t), c_void_p]),
    "epmoe_rope_table": (c_int32, [POINTER(epmoe_rope_table_args_t)]),
    "epmoe_cache_write": (c_int32, [POINTER(epmoe_cache_write_args_t), c_void_p]),
    "epmoe_rope_cache_write": (c_int32, [POINTER(epmoe_rope_args_t), POINTER(epmoe_cache_write_args_t), c_void_p]),
    "epmoe_attention_workspace_size": (c_int32, [POINTER(epmoe_attention_args_t), c_void_p]),
    "epmoe_attention": (c_int32, [POINTER(epmoe_attention_args_t), c_void_p]),
    "epmoe_sample": (c_int32, [POINTER(epmoe_sample_args_t), c_void_p]),
    "epmoe_spec_verify": (c_int32, [POINTER(epmoe_spec_verify_args_t), c_void_p]),
    "epmoe_transport_string": (c_char_p, [c_int32]),
    "epmoe_comm_create": (c_int32, [POINTER(epmoe_bootstrap_t), POINTER(epmoe_comm_config_t), POINTER(c_void_p)]),
    "epmoe_comm_destroy": (None, [c_void_p]),
    "epmoe_comm_rank": (c_int32, [c_void_p]),
    "epmoe_comm_size": (c_int32, [c_void_p]),
    "epmoe_comm_transport": (c_int32, [c_void_p]),
    "epmoe_comm_ranks_per_device": (c_int32, [c_void_p]),
    "epmoe_comm_get_async_error": (c_int32, [c_void_p]),
    "epmoe_comm_all_gather": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64]),
    "epmoe_comm_agree": (c_int32, [c_void_p, c_int32]),
    "epmoe_expert_range": (c_int32, [c_int32, c_int32, c_int32, c_void_p, c_void_p]),
    "epmoe_ep_create": (c_int32, [c_void_p, POINTER(epmoe_ep_config_t), POINTER(c_void_p)]),
    "epmoe_ep_destroy": (None, [c_void_p]),
    "epmoe_ep_buffer_size": (c_int32, [POINTER(epmoe_ep_config_t), c_int32, c_int64, c_void_p]),
    "epmoe_dispatch": (c_int32, [c_void_p, POINTER(epmoe_dispatch_args_t), POINTER(epmoe_dispatch_result_t), c_void_p]),
    "epmoe_combine": (c_int32, [c_void_p, POINTER(epmoe_combine_args_t), c_void_p]),
    "epmoe_ep_partial_dtype": (c_int32, [c_void_p]),
    "epmoe_placement_plan": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "epmoe_preset_config": (c_int32, [c_char_p, POINTER(epmoe_layer_config_t)]),
    "epmoe_preset_name": (c_char_p, [c_int32]),
    "epmoe_checkpoint_open": (c_int32, [c_char_p, POINTER(c_void_p)]),
    "epmoe_checkpoint_close": (None, [c_void_p]),
    "epmoe_checkpoint_get_info": (c_int32, [c_void_p, POINTER(epmoe_checkpoint_info_t)]),
    "epmoe_checkpoint_layer_config": (c_int32, [c_void_p, c_int32, POINTER(epmoe_layer_config_t)]),
    "epmoe_layer_create": (c_int32, [POINTER(epmoe_layer_config_t), c_void_p, POINTER(c_void_p)]),
    "epmoe_layer_destroy": (None, [c_void_p]),
    "epmoe_layer_memory": (c_int32, [POINTER(epmoe_layer_config_t), c_int32, c_int32, POINTER(epmoe_layer_memory_t)]),
    "epmoe_layer_set_weights": (c_int32, [c_void_p, POINTER(epmoe_layer_weights_t)]),
    "epmoe_layer_set_random_weights": (c_int32, [c_void_p, c_uint64]),
    "epmoe_layer_load_checkpoint": (c_int32, [c_void_p, c_void_p, c_int32, POINTER(epmoe_load_options_t)]),
    "epmoe_stage_string": (c_char_p, [c_int32]),
    "epmoe_layer_forward_args": (c_int32, [c_void_p, POINTER(epmoe_forward_args_t), c_void_p]),
    "epmoe_layer_forward": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
    "epmoe_checkpoint_decoder_config": (c_int32, [c_void_p, c_int32, POINTER(epmoe_decoder_config_t)]),
    "epmoe_preset_decoder_config": (c_int32, [c_char_p, POINTER(epmoe_decoder_config_t)]),
    "epmoe_decoder_block_bytes": (c_int32, [POINTER(epmoe_decoder_config_t), c_int32, c_void_p, c_void_p]),
    "epmoe_decoder_create": (c_int32, [POINTER(epmoe_decoder_config_t), POINTER(epmoe_layer_config_t), c_void_p, POINTER(c_void_p)]),
    "epmoe_decoder_destroy": (None, [c_void_p]),
    "epmoe_decoder_load_checkpoint": (c_int32, [c_void_p, c_void_p, c_int32, POINTER(epmoe_load_options_t)]),
    "epmoe_decoder_set_random_weights": (c_int32, [c_void_p, c_uint64]),
    "epmoe_decoder_forward": (c_int32, [c_void_p, POINTER(epmoe_decoder_forward_args_t), c_void_p]),
    "epmoe_checkpoint_head_config": (c_int32, [c_void_p, POINTER(epmoe_head_config_t)]),
    "epmoe_head_create": (c_int32, [POINTER(epmoe_head_config_t), POINTER(c_void_p)]),
    "epmoe_head_destroy": (None, [c_void_p]),
    "epmoe_head_load_checkpoint": (c_int32, [c_void_p, c_void_p]),
    "epmoe_head_forward": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
}
