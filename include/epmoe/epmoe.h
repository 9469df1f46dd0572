/* epmoe: the Mixture-of-Experts layer of large language models, its experts spread over GPUs or CPUs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Three levels, each usable alone:
 *   ops            epmoe_topk ... epmoe_spec_verify: one stage on caller-owned buffers
 *   communication  epmoe_comm_*, epmoe_ep_*: dispatch rows to the ranks that own their experts, combine the results
 *   layer          epmoe_layer_*: router, dispatch, experts, combine, shared expert; weights from a checkpoint. Around
 *                  it epmoe_decoder_*: a decoder layer over a paged KV cache, and epmoe_head_*: the logits
 *
 * Conventions that hold everywhere:
 *   - Every call returns an epmoe_status_t. On an error nothing of the outputs is written (unless the function says
 *     otherwise), nothing leaks and every handle stays usable; epmoe_last_error() has the details.
 *   - Structs start with struct_size; fill it with the type's INIT macro. A zero field takes its documented default.
 *     Structs only ever grow at the end. A caller newer than the library is accepted if the fields that the library
 *     does not know are zero.
 *   - Tensors are dense and row-major, sizes in elements unless the name ends in _bytes. [T,d] is T rows of d.
 *     T tokens, E experts, k = top_k, d = hidden, f = intermediate.
 *   - backend CPU: pointers are host memory, any element-aligned address, streams are ignored and the call has finished
 *     its work when it returns. backend CUDA: pointers are device memory aligned to 16 bytes, the call only enqueues
 *     on `stream` (never the default stream unless NULL is passed), never allocates and never synchronises.
 *   - Outputs must not overlap inputs except where a field says "may alias".
 *   - T = 0 succeeds with NULL data pointers and writes nothing but counts.
 *   - Calls on one handle are not thread-safe; different handles and all ops are. Nothing is printed; see
 *     epmoe_set_log.
 *   - Same inputs, same bits, on every run with the same thread count and backend.
 */
#ifndef EPMOE_EPMOE_H
#define EPMOE_EPMOE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define EPMOE_API __attribute__((visibility("default")))
#else
#define EPMOE_API
#endif

/* A struct with its struct_size set and every other field zero. */
#ifdef __cplusplus
#define EPMOE_STRUCT_INIT(type)                                                                                        \
    [] {                                                                                                               \
        type epmoe_init_ = type();                                                                                     \
        epmoe_init_.struct_size = sizeof(type);                                                                        \
        return epmoe_init_;                                                                                            \
    }()
extern "C" {
#else
#define EPMOE_STRUCT_INIT(type)                                                                                        \
    {                                                                                                                  \
        .struct_size = sizeof(type)                                                                                    \
    }
#endif

#define EPMOE_VERSION_MAJOR 0
#define EPMOE_VERSION_MINOR 1
#define EPMOE_VERSION_PATCH 0

#define EPMOE_MAX_EXPERTS 4096
#define EPMOE_MAX_TOP_K   32

/* The CUDA driver's stream type (cudaStream_t is the same pointer); NULL on the CPU. */
typedef struct CUstream_st *epmoe_stream_t;

/* ------------------------------------------------------------------------------------------------------- status */

/* X(name, value, text): one list yields the enum and epmoe_status_string. */
#define EPMOE_STATUS_MAP(X)                                                                                            \
    X(OK, 0, "success")                                                                                                \
    X(ERROR_INVALID_ARGUMENT, 1, "invalid argument")                                                                   \
    X(ERROR_NOT_SUPPORTED, 2, "not supported")                                                                         \
    X(ERROR_OUT_OF_MEMORY, 3, "out of memory")                                                                         \
    X(ERROR_IO, 4, "file cannot be read")                                                                              \
    X(ERROR_FORMAT, 5, "file content is invalid")                                                                      \
    X(ERROR_MISMATCH, 6, "ranks disagree")                                                                             \
    X(ERROR_CAPACITY, 7, "received rows exceed the capacity")                                                          \
    X(ERROR_TIMEOUT, 8, "a peer did not answer in time")                                                               \
    X(ERROR_PEER, 9, "a peer reported an error")                                                                       \
    X(ERROR_TRANSPORT, 10, "the transport failed")                                                                     \
    X(ERROR_CUDA, 11, "a CUDA call failed")                                                                            \
    X(ERROR_BAD_STATE, 12, "call out of order, or the handle has failed")                                              \
    X(ERROR_INTERNAL, 13, "internal error")

typedef enum epmoe_status_t {
#define EPMOE_STATUS_ENUM(name, value, text) EPMOE_##name = value,
    EPMOE_STATUS_MAP(EPMOE_STATUS_ENUM)
#undef EPMOE_STATUS_ENUM
        EPMOE_STATUS_FORCE_INT32 = 0x7FFFFFFF
} epmoe_status_t;

/* The fixed text of a status, never NULL. */
EPMOE_API const char *epmoe_status_string(epmoe_status_t status);

/* What the last failing call of this thread said: the argument, its value, what was expected. Never NULL; "" before
 * the first error. Valid until the next failing call of this thread. */
EPMOE_API const char *epmoe_last_error(void);

/* Sets this thread's last error and returns `status`: for bootstrap callbacks, whose text the library then quotes, and
 * for libraries built on this one. message NULL = "". */
EPMOE_API epmoe_status_t epmoe_set_last_error(epmoe_status_t status, const char *message);

/* major*10000 + minor*100 + patch of the library that was loaded. */
EPMOE_API int32_t epmoe_version(void);

typedef enum epmoe_log_level_t { EPMOE_LOG_WARNING = 1, EPMOE_LOG_INFO = 2 } epmoe_log_level_t;

/* Where warnings (an unknown tensor in a checkpoint, a list that contradicts the file) go. `fn` may be called from
 * any thread inside a call of the library, and may still run in another one when epmoe_set_log returns; NULL (the
 * default) drops them. Process-wide. */
typedef void (*epmoe_log_fn)(void *ctx, epmoe_log_level_t level, const char *message);
EPMOE_API void epmoe_set_log(epmoe_log_fn fn, void *ctx);

/* -------------------------------------------------------------------------------------------------------- enums */

typedef enum epmoe_dtype_t {
    EPMOE_DTYPE_NONE = 0,
    EPMOE_F32 = 1,
    EPMOE_BF16 = 2,
    EPMOE_F16 = 3,
    EPMOE_F8_E4M3 = 4,
    EPMOE_F8_E8M0 = 5,
    EPMOE_U8 = 6,
    EPMOE_I32 = 7,
    EPMOE_I64 = 8,
} epmoe_dtype_t;

/* "f32", "bf16", ...; "none" for anything unknown. */
EPMOE_API const char *epmoe_dtype_string(epmoe_dtype_t dtype);
/* Bytes per element, 0 for anything unknown. */
EPMOE_API int32_t epmoe_dtype_size(epmoe_dtype_t dtype);

typedef enum epmoe_backend_t {
    EPMOE_BACKEND_AUTO = 0, /* CUDA when this build has it and a device is present, the CPU otherwise */
    EPMOE_BACKEND_CPU = 1,
    EPMOE_BACKEND_CUDA = 2,
} epmoe_backend_t;

/* What AUTO means here and now; an explicit backend that cannot run here is NOT_SUPPORTED (the message says why). */
EPMOE_API epmoe_status_t epmoe_backend_resolve(epmoe_backend_t backend, epmoe_backend_t *resolved);

/* The name of the kernel tier in use on a backend: "ref", "cpu-generic", "cpu-avx2", "cpu-avx512", "sm80", "sm90".
 * EPMOE_ARCH=ref|cpu|sm80|sm90 in the environment (read once) masks the tiers above it. */
EPMOE_API const char *epmoe_backend_arch(epmoe_backend_t backend);

/* How a row of router logits becomes scores. All arithmetic is fp32. */
typedef enum epmoe_scoring_t {
    EPMOE_SCORING_SOFTMAX = 0,
    EPMOE_SCORING_SIGMOID = 1,
    EPMOE_SCORING_SQRT_SOFTPLUS = 2,
    EPMOE_SCORING_TOPK_SOFTMAX = 3, /* choose by logit, then softmax over the k chosen */
    EPMOE_SCORING_SPARSE_MIXER = 4, /* choose by logit; the weight of each choice is its softmax among the experts close
                                       to it that were not chosen before it (Liu et al. 2023) */
} epmoe_scoring_t;

typedef enum epmoe_group_score_t {
    EPMOE_GROUP_SCORE_TOP2 = 0, /* sum of the two best biased scores of the group */
    EPMOE_GROUP_SCORE_MAX = 1,
} epmoe_group_score_t;

/* h = act(gate, up), elementwise, fp32:
 *   SILU        gate * sigmoid(gate) * up           (SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer")
 *   GELU        gate * Phi(gate) * up, exact erf
 *   GELU_TANH   the tanh approximation of GELU (Hendrycks and Gimpel 2016)
 *   SWIGLU_OAI  g = min(gate, limit), u = clamp(up, -limit, limit); g * sigmoid(alpha * g) * (u + 1)
 * A limit > 0 with SILU, GELU or GELU_TANH clamps gate above and up on both sides first.
 * silu(-inf) and gelu(-inf) are 0. */
typedef enum epmoe_activation_t {
    EPMOE_ACTIVATION_SILU = 0,
    EPMOE_ACTIVATION_GELU = 1,
    EPMOE_ACTIVATION_GELU_TANH = 2,
    EPMOE_ACTIVATION_SWIGLU_OAI = 3, /* alpha default 1.702, limit default 7 */
    EPMOE_ACTIVATION_NONE = 4,       /* grouped GEMM only: y = x w^T (+ bias) */
    EPMOE_ACTIVATION_SIGMOID = 5,    /* grouped GEMM only: y = sigmoid(x w^T (+ bias)), N outputs */
} epmoe_activation_t;

/* How expert weights are stored; the tensors of each are those of the file formats of the same name. */
typedef enum epmoe_format_t {
    EPMOE_FORMAT_NONE = 0,
    EPMOE_FORMAT_F32 = 1,
    EPMOE_FORMAT_BF16 = 2,
    EPMOE_FORMAT_F16 = 3,
    EPMOE_FORMAT_FP8_BLOCK = 4, /* E4M3 with a scale per 128x128 block */
    EPMOE_FORMAT_GPTQ = 5,
    EPMOE_FORMAT_AWQ = 6,
    EPMOE_FORMAT_CT_W4 = 7, /* compressed-tensors pack-quantized */
    EPMOE_FORMAT_MXFP4 = 8,
    EPMOE_FORMAT_W4 = 9, /* no file format: what GPTQ, AWQ and CT_W4 are repacked into */
} epmoe_format_t;
EPMOE_API const char *epmoe_format_string(epmoe_format_t format);

/* The order of the 2f rows of a gate/up weight [2f,d]. */
typedef enum epmoe_layout_t {
    EPMOE_LAYOUT_GATE_FIRST = 0,  /* rows 0..f-1 gate, f..2f-1 up */
    EPMOE_LAYOUT_INTERLEAVED = 1, /* rows 2i gate, 2i+1 up */
    EPMOE_LAYOUT_PACKED = 2,      /* what the backend computes on: on the CPU the same as GATE_FIRST */
} epmoe_layout_t;

/* clang-format off */
/* One projection of one or more experts: w [E,N,K], row n of expert e dotted with x gives y[n].
 * Plain formats (F32, BF16, F16) use `data` only. Quantised ones have the tensors of the file formats of the same name,
 * stacked along E; g = group_size, G = ceil(K/g), words are 32-bit with eight 4-bit codes, the lowest bits first:
 *   FP8_BLOCK  data E4M3 [E,N,K]; scales [E,ceil(N/r),ceil(K/g)]: w = code * scale; r = group_rows, so that with
 *              g = -1 r = 1 is a scale per row and r = -1 one per expert
 *   GPTQ       data words [E,ceil(K/8),N], eight k each; scales [E,G,N]; zeros words [E,G,ceil(N/8)]; g_idx [E,K] or
 *              NULL: w = scale * (code - zero), the group of column k is g_idx[k], or k / g
 *   AWQ        data words [E,K,ceil(N/8)], nibble i of word c is row 8c + (0,2,4,6,1,3,5,7)[i]; scales [E,G,N];
 *              zeros words [E,G,ceil(N/8)], nibbles as in data
 *   CT_W4      data words [E,N,ceil(K/8)]; scales [E,N,G]; zeros words [E,ceil(N/8),G], eight rows each, or NULL = 8;
 *              g_idx as GPTQ
 *   MXFP4      data [E,N,K/2], two codes per byte; scales E8M0 [E,N,K/32]: w = e2m1(code) * 2^(scale - 127), a NaN
 *              for a scale of 255
 *   W4         data words [E,N,ceil(K/8)]; scales [E,N,G]; zeros bytes [E,N,G] or NULL = 8; g_idx [E,H,K] or NULL:
 *              the order of the columns, each of the H rows a permutation of 0..K-1: stored column j multiplies
 *              column g_idx[j] of x. H = 2 (gate rows, up rows) with an activation, otherwise 1
 * With the layout PACKED and an activation the up rows of FP8_BLOCK begin a block row of their own:
 * scales [E,2*ceil(f/r),ceil(K/g)].
 * On CUDA epmoe_dequant takes all of these; products take FP8_BLOCK, W4 and MXFP4, aligned to 16 bytes, scales and
 * zeros too: FP8_BLOCK as above (K a multiple of 16, g a multiple of 64 or >= K; with PACKED and an activation rows 2i
 * are gate and 2i+1 up), W4 and MXFP4 with PACKED alone and as EPMOE_STORAGE_TILES, which epmoe_pack_tiles makes of
 * rows (g 16, 32, a multiple of 64 or >= K). BF16 and F16 may be tiles too on compute capability 9.0, which streams
 * them faster than rows (K a multiple of 64; with an activation PACKED, N a multiple of 16). A layer makes the tiles of
 * its own weights. Compute capability 9.0 with bf16 rounds scale and weight of W4 to bf16. */
/* clang-format on */
typedef enum epmoe_storage_t {
    EPMOE_STORAGE_ROWS = 0,  /* as above */
    EPMOE_STORAGE_TILES = 1, /* for products on CUDA: the arrays that epmoe_pack_tiles makes */
} epmoe_storage_t;

typedef struct epmoe_weight_t {
    size_t struct_size;
    epmoe_format_t format;
    int32_t group_size;         /* K columns per scale; 0 = 128, -1 = one group; MXFP4: 32 or 0 */
    int32_t zero_convention;    /* GPTQ: 1 = stored is zero - 1 (mod 16), 2 = stored is zero; 0 = 1 */
    epmoe_dtype_t scales_dtype; /* F32 (0 = F32), BF16, F16 or F8_E8M0; MXFP4: F8_E8M0 or 0 */
    const void *data;
    const void *scales;
    const void *zeros;
    const int32_t *g_idx;
    epmoe_storage_t storage;
    int32_t group_rows; /* FP8_BLOCK: N rows per scale; 0 = as many as group_size says, -1 = all */
} epmoe_weight_t;
#define EPMOE_WEIGHT_INIT EPMOE_STRUCT_INIT(epmoe_weight_t)

/* ---------------------------------------------------------------------------------------------------------- ops */

/* Router: scores and top-k of each row of logits.
 *   - ids[t,:] are distinct, in [0,E), in descending order of the selection value: the logit for SOFTMAX and
 *     TOPK_SOFTMAX without a selection bias and for SPARSE_MIXER, score + bias (fp32) otherwise. Equal values: the
 *     lower id first.
 *   - NaN counts as -inf and +inf as the largest finite float; such a -inf stays -inf after the bias. A row in which
 *     every logit is NaN or -inf gets ids 0..k-1 and weights 0. Weights are always finite.
 *   - weights[t,j] = score of ids[t,j] (never the biased one), divided by the sum over the k if renormalize (0 if that
 *     sum is below 2^-126), times scale once. TOPK_SOFTMAX: softmax over the k chosen logits, times scale.
 *     SPARSE_MIXER: the score of the j-th choice, with logit m, is 1 / (sum of exp(l - m)) over the logits l that were
 *     not chosen before it and for which not (m - l) / max(|l|, m) > 2 * jitter; m = -inf: 0.
 *   - Groups: E is cut into n_group equal parts; the topk_group parts with the best group score (equal: the lower)
 *     stay, and ids come from these only.
 * Errors: INVALID_ARGUMENT for E outside 1..4096, k outside 1..min(E,32), E not divisible by n_group, topk_group
 * outside 1..n_group, k > topk_group * E / n_group, a NULL pointer with T > 0, an unknown enum, jitter outside [0,1),
 * SPARSE_MIXER with groups or a selection bias.
 * Floor: bytes = T*(E*b + 8*k), b = bytes per logit. */
typedef struct epmoe_topk_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;          /* T >= 0 */
    int32_t num_experts;         /* E */
    int32_t top_k;               /* k */
    epmoe_dtype_t logits_dtype;  /* F32 (0 = F32), BF16 or F16 */
    const void *logits;          /* [T,E] */
    int64_t logits_stride;       /* elements from row to row; 0 = E */
    const float *selection_bias; /* [E] or NULL: added for the choice, never to the weight */
    epmoe_scoring_t scoring;
    int32_t renormalize; /* 0 or 1 */
    float scale;         /* 0 = 1 */
    int32_t n_group;     /* 0 = 1 */
    int32_t topk_group;  /* 0 = n_group */
    epmoe_group_score_t group_score;
    int32_t *ids;                  /* out [T,k] */
    float *weights;                /* out [T,k] */
    const int32_t *num_tokens_dev; /* optional, same memory as the tensors: the actual T, at most num_tokens; rows past
                                      it are not written */
    float jitter;                  /* SPARSE_MIXER; 0 = 0.01 */
} epmoe_topk_args_t;
#define EPMOE_TOPK_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_topk_args_t)
EPMOE_API epmoe_status_t epmoe_topk(const epmoe_topk_args_t *args, epmoe_stream_t stream);

/* Stable counting sort of the T*k slots by expert, each expert padded to a multiple of block_size.
 * Experts ascend; within an expert the flat slot index t*k + j ascends. sorted_ids holds slot indices, T*k where
 * padded; blocks never cross experts. With expert_map, slots of an expert mapped to -1 are left out, expert_ids holds
 * the mapped (local) ids, and the order stays that of the unmapped ones. Slots with id -1 are left out.
 * Everything past num_post_padded is filled: sorted_ids with T*k, expert_ids with -1.
 *   P = epmoe_align_max_padded(T, k, E, block) = round_up(T*k + E*(block-1), block), the worst case.
 * Errors: INVALID_ARGUMENT for E outside 1..4096, k < 1, block < 1, P above INT32_MAX, and on the CPU an id outside
 * [-1,E) or a map entry below -1 (nothing is written). On CUDA such an id counts as -1 and adds to a device error
 * word that the next call of the host reports.
 * Floor: bytes = 4*(T*k + P + P/block + E). */
typedef struct epmoe_align_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t top_k;
    int32_t num_experts;
    int32_t block_size;        /* 0 = 1: no padding */
    const int32_t *ids;        /* [T,k] */
    const int32_t *expert_map; /* [E] or NULL */
    int32_t *sorted_ids;       /* out [P] */
    int32_t *expert_ids;       /* out [P/block], may be NULL */
    int32_t *num_post_padded;  /* out [1] */
    int32_t *expert_offsets;   /* out [E+1], may be NULL: rows of expert e are sorted_ids[offsets[e] .. offsets[e+1]) */
    const int32_t *num_tokens_dev; /* as in epmoe_topk_args_t; the pad value stays num_tokens*k */
    void *workspace;
    int64_t workspace_bytes; /* at least epmoe_align_workspace_size */
} epmoe_align_args_t;
#define EPMOE_ALIGN_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_align_args_t)
/* P, or -1 when it exceeds INT32_MAX or an argument is out of range. */
EPMOE_API int64_t epmoe_align_max_padded(int32_t num_tokens, int32_t top_k, int32_t num_experts, int32_t block_size);
/* Bytes of scratch for these sizes (pointers are not read); 0 is legal. */
EPMOE_API epmoe_status_t epmoe_align_workspace_size(const epmoe_align_args_t *args, int64_t *bytes);
EPMOE_API epmoe_status_t epmoe_align_block_size(const epmoe_align_args_t *args, epmoe_stream_t stream);

/* Materialised gather for callers that need contiguous rows: y[p,:] = x[sorted_ids[p] / k, :] for p < *num_rows,
 * zeros where sorted_ids[p] is padding; rows p >= *num_rows are not written. inverse[s] = p for each slot s, -1 for
 * slots that are not in sorted_ids. Bit-exact copy; any dtype of 1, 2 or 4 bytes.
 * Errors: INVALID_ARGUMENT as above; on the CPU also *num_rows above max_rows or a negative sorted id.
 * Floor: bytes = T*d*b + P*d*b + 8*P. */
typedef struct epmoe_permute_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t top_k;
    int32_t hidden;
    epmoe_dtype_t dtype;
    const void *x;             /* [T,d] */
    const int32_t *sorted_ids; /* [max_rows] */
    const int32_t *num_rows;   /* [1]: align's num_post_padded */
    int32_t max_rows;          /* P */
    void *y;                   /* out [max_rows,d] */
    int32_t *inverse;          /* out [T*k] or NULL */
} epmoe_permute_args_t;
#define EPMOE_PERMUTE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_permute_args_t)
EPMOE_API epmoe_status_t epmoe_permute(const epmoe_permute_args_t *args, epmoe_stream_t stream);

/* The way back: out[t,:] = sum over j ascending of weights[t,j] * y[inverse[t*k+j],:] in fp32, rounded once. A slot
 * with inverse -1 adds nothing, and neither its row nor its weight is read. weights NULL = all 1.
 * Floor: bytes = T*k*d*b + T*d*b + 8*T*k. */
typedef struct epmoe_unpermute_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t top_k;
    int32_t hidden;
    epmoe_dtype_t dtype;    /* F32, BF16, F16 */
    const void *y;          /* [max_rows,d] */
    int32_t max_rows;       /* bound of the entries of inverse */
    const int32_t *inverse; /* [T*k] */
    const float *weights;   /* [T,k] or NULL */
    void *out;              /* out [T,d] */
} epmoe_unpermute_args_t;
#define EPMOE_UNPERMUTE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_unpermute_args_t)
EPMOE_API epmoe_status_t epmoe_unpermute(const epmoe_unpermute_args_t *args, epmoe_stream_t stream);

/* What one scale of a quantised activation covers. */
typedef enum epmoe_granularity_t {
    EPMOE_GRANULARITY_TENSOR = 1,   /* everything: scale [1] */
    EPMOE_GRANULARITY_TOKEN = 2,    /* a row: scale [T,1] */
    EPMOE_GRANULARITY_BLOCK128 = 3, /* 128 columns of a row: scale [T, ceil(d/128)], the last block may be narrow */
} epmoe_granularity_t;

/* Grouped GEMM by row index. For every expert e and every row r in [expert_offsets[e], expert_offsets[e+1]):
 *     s     = row_index ? row_index[r] : r                         (skipped when s >= num_slots: padding)
 *     acc   = sum over K of x[s / x_row_divisor, :] * w[e, n, :]   (fp32)
 *     acc  *= row_weights[s] if weight_on_input
 *     acc  += bias[e, n]
 *     out   = NONE: acc[n];  SIGMOID: sigmoid(acc[n]);  otherwise act(acc[gate i], acc[up i]) for i < N/2
 *     out  *= row_weights[s] unless weight_on_input
 *     y[s, :] = round(out, y_dtype)
 * Rows of y that no r reaches are not written. N counts gate and up rows together (2f) when an activation is given.
 * With activation, GEMM 1 of the experts in one call; with row_weights, GEMM 2. x_sorted and y_sorted keep what lies
 * between the two in the sorted order, where a tile's rows are neighbours.
 * batch_invariant: a row's bits do not depend on the other rows of the call (it forgoes BLAS on the CPU).
 * x of F8_E4M3, with an FP8_BLOCK weight, are codes as epmoe_quantize_fp8 or a fused op makes them: a value is its code
 * times its scale in x_scale. With fp8_activations x of another type becomes such codes in the call.
 * Errors: INVALID_ARGUMENT for sizes out of range, NULL pointers, N odd with an activation, a too small workspace; on
 * the CPU also for offsets that do not start at 0 or above, decrease or pass max_rows, and a negative row index. Of a
 * quantised weight also for a bad field, fp8_activations or x of F8_E4M3 with another format than FP8_BLOCK, x_quant
 * and x_scale that do not go with x_dtype and, on the CPU, a g_idx out of range or, of W4, that is no permutation.
 * NOT_SUPPORTED on CUDA for K not a multiple of 8, fp32 x or weights, and two different types; for W4 and MXFP4 on CUDA
 * that are not stored in tiles, BF16 and F16 in tiles of other sizes or on other devices than epmoe_weight_t says, and
 * tiles on the CPU.
 * fp8_activations and x of F8_E4M3 need on CUDA compute capability 9.0, K (gated: N too) a multiple of 16, and a
 * group_size of -1 with any group_rows, or a multiple of 128 with as many group_rows; with GATE_FIRST up rows begin
 * with a block.
 * Floor: bytes = active experts*N*K*b + R*K*b + R*N_out*b, and the scales; flops = 2*R*N*K. */
typedef struct epmoe_grouped_gemm_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_experts;           /* E >= 1 */
    int32_t n;                     /* N: rows of w */
    int32_t k;                     /* K: columns of w and of x */
    int32_t max_rows;              /* bound of expert_offsets[E] */
    const int32_t *expert_offsets; /* [E+1]; NULL with E = 1: all rows are its */
    const int32_t *row_index;      /* [max_rows] or NULL */
    int32_t num_slots;             /* rows of y; row indices >= this are padding; 0 = max_rows */
    int32_t x_row_divisor;         /* top_k when x has a row per token; 0 = 1 */
    epmoe_dtype_t x_dtype;         /* F32, BF16, F16 or F8_E4M3 */
    const void *x;                 /* [num_slots / x_row_divisor, K] */
    epmoe_weight_t weight;         /* [E,N,K] */
    epmoe_layout_t layout;         /* order of gate and up rows when an activation is given */
    const float *bias;             /* [E,N] or NULL, in the order of the rows of w */
    epmoe_activation_t activation; /* 0 is SILU: set NONE for a plain GEMM */
    float alpha;                   /* see epmoe_activation_t */
    float limit;
    const float *row_weights; /* [num_slots] or NULL */
    int32_t weight_on_input;  /* 0 or 1 */
    int32_t batch_invariant;  /* 0 or 1 */
    epmoe_dtype_t y_dtype;
    void *y; /* out [num_slots, N or N/2] */
    void *workspace;
    int64_t workspace_bytes;     /* at least epmoe_grouped_gemm_workspace_size */
    const int32_t *num_rows_dev; /* with expert_offsets NULL and one expert: the actual rows, at most max_rows; same
                                    memory as the tensors; NULL = max_rows */
    int32_t x_sorted;            /* 0 or 1: x is [max_rows, K], row r belongs to r instead of s / x_row_divisor */
    int32_t y_sorted;            /* 0 or 1: y is [max_rows, N or N/2], row r instead of s */
    int32_t fp8_activations;     /* 0 or 1, FP8_BLOCK only: x is first quantised as epmoe_quantize_fp8 does, BLOCK128 */
    epmoe_granularity_t x_quant; /* of x that is F8_E4M3, and only then: what one of its scales covers */
    const float *x_scale;        /* with x_quant: the scales of x, in the same memory; T is the rows that x has */
} epmoe_grouped_gemm_args_t;
#define EPMOE_GROUPED_GEMM_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_grouped_gemm_args_t)
EPMOE_API epmoe_status_t epmoe_grouped_gemm_workspace_size(const epmoe_grouped_gemm_args_t *args, int64_t *bytes);
EPMOE_API epmoe_status_t epmoe_grouped_gemm(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);

/* y[t,i] = act(x[t,i], x[t,d+i]): first half gate, second half up (see epmoe_activation_t). Any d.
 * With quant y is E4M3 and has the bits that quantising the rounded rows would give, as in epmoe_rms_norm_args_t.
 * y may alias x only without quant and when its row i starts where x's row i does (y == x and y_stride == x_stride).
 * Floor: bytes = T*d*(2*b + b_y), and the scales. */
typedef struct epmoe_silu_and_mul_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t width;       /* d: columns of y */
    epmoe_dtype_t dtype; /* F32, BF16, F16 */
    const void *x;       /* [T,2d] */
    int64_t x_stride;    /* elements from row to row; 0 = 2d */
    void *y;             /* out [T,d]: dtype, or F8_E4M3 with quant */
    int64_t y_stride;    /* 0 = d */
    epmoe_activation_t activation;
    float alpha;               /* 0 = default of the activation */
    float limit;               /* 0 = none (SWIGLU_OAI: 7) */
    epmoe_granularity_t quant; /* 0 = none: y is not quantised */
    const float *static_scale; /* [1]: with TENSOR, and only then; on the CPU finite and above 0 */
    float *scale;              /* out: with TOKEN and BLOCK128, see epmoe_granularity_t */
} epmoe_silu_and_mul_args_t;
#define EPMOE_SILU_AND_MUL_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_silu_and_mul_args_t)
EPMOE_API epmoe_status_t epmoe_silu_and_mul(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream);

/* out[t,:] = sum over j ascending of weights[t,j] * y[t,j,:], + addend[t,:] + residual[t,:], fp32, rounded once. A slot
 * with id -1 adds nothing, and neither its row nor its weight is read. out may alias residual.
 * Floor: bytes = T*k*d*b + T*d*b (+ T*d*b with residual, + 4*T*d with addend). */
typedef struct epmoe_sum_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t top_k;
    int32_t hidden;
    epmoe_dtype_t y_dtype;         /* of the slot rows: F32, BF16, F16 */
    epmoe_dtype_t out_dtype;       /* of out and residual; 0 = y_dtype */
    const void *y;                 /* [T,k,d] */
    const float *weights;          /* [T,k] or NULL (already applied) */
    const int32_t *ids;            /* [T,k] or NULL (every slot used) */
    const void *residual;          /* [T,d] or NULL: added last */
    void *out;                     /* out [T,d] */
    const float *addend;           /* [T,d] or NULL: added before the residual */
    const int32_t *num_tokens_dev; /* as in epmoe_topk_args_t */
} epmoe_sum_args_t;
#define EPMOE_SUM_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_sum_args_t)
EPMOE_API epmoe_status_t epmoe_sum(const epmoe_sum_args_t *args, epmoe_stream_t stream);

/* The routed experts of a layer for given routing: align, GEMM 1 with the activation, GEMM 2, sum.
 *     h[t,j,:] = round(act(x[t] w13[e]^T + b13[e]), dtype)         e = ids[t,j]
 *     y[t,:]   = round(sum over j ascending of weights[t,j] * (h[t,j] w2[e]^T + b2[e]) + addend[t] + residual[t],
 *                      y_dtype)
 * weight_on_input multiplies x's product by the weight before the bias and the activation, instead of the output
 * (Llama 4). A slot with id -1 adds nothing and its weight is not read; an expert twice in one token counts twice;
 * a token without any slot gets addend + residual, or zeros. y may alias x.
 * Errors: as the ops it is made of. On the CPU an id outside [-1,E) is INVALID_ARGUMENT and nothing is written.
 * Floor: bytes = active experts*3*d*f*b + T*d*2*b + 2*T*k*f*b; flops = 6*T*k*d*f. */
typedef struct epmoe_experts_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t top_k;
    int32_t num_experts;
    int32_t hidden;
    int32_t intermediate;
    epmoe_dtype_t dtype;       /* of x, and what h is rounded to: F32, BF16, F16 */
    epmoe_dtype_t y_dtype;     /* 0 = dtype */
    const void *x;             /* [T,d] */
    const int32_t *ids;        /* [T,k] */
    const float *weights;      /* [T,k] */
    epmoe_weight_t gate_up;    /* w13 [E,2f,d] */
    epmoe_weight_t down;       /* w2 [E,d,f] */
    epmoe_layout_t layout;     /* of gate_up and its bias */
    const float *gate_up_bias; /* b13 [E,2f] or NULL */
    const float *down_bias;    /* b2 [E,d] or NULL */
    epmoe_activation_t activation;
    float alpha;
    float limit;
    int32_t weight_on_input;
    void *y; /* out [T,d] */
    void *workspace;
    int64_t workspace_bytes;       /* at least epmoe_experts_workspace_size */
    const float *addend;           /* [T,d] or NULL */
    const void *residual;          /* [T,d] of y_dtype or NULL; y may alias it */
    const int32_t *num_tokens_dev; /* as in epmoe_topk_args_t */
    int32_t fp8_activations;       /* 0 or 1, FP8_BLOCK only: x and h are first quantised, 128 columns per scale */
} epmoe_experts_args_t;
#define EPMOE_EXPERTS_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_experts_args_t)
EPMOE_API epmoe_status_t epmoe_experts_workspace_size(const epmoe_experts_args_t *args, int64_t *bytes);
EPMOE_API epmoe_status_t epmoe_experts(const epmoe_experts_args_t *args, epmoe_stream_t stream);

/* ------------------------------------------------------------------------------------------------- quantisation */

/* Activations to E4M3: q = e4m3(x / scale), where the scale of each part is
 *     max(amax / 448, 2^-126), with pow2 2^ceil(log2 of it): a power of two stays
 * and amax the largest |x| of the part, bounded by scale_ub; a NaN does not count, an infinity counts as the largest
 * finite value. So a scale is finite and never 0. Codes round to nearest even and saturate: NaN = 0x7F, +-inf = +-448,
 * -0 = 0x80. With static_scale that one is used for all, and copied to `scale`.
 * Errors: INVALID_ARGUMENT for sizes below 1, an unknown enum, a stride below the row, NULL pointers, a static_scale or
 * scale_ub that is not finite and above 0 (CPU), a static_scale with another granularity than TENSOR, pow2 or scale_ub,
 * on CUDA x or q not aligned to 16 bytes, the rest to 4. T = 0 is a no-op. No aliasing.
 * Floor: bytes = T*d*(b + 1) and the scales; TENSOR reads x twice. */
typedef struct epmoe_quantize_fp8_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;  /* T */
    int32_t hidden;      /* d */
    epmoe_dtype_t dtype; /* of x: F32, BF16, F16 */
    epmoe_granularity_t granularity;
    int32_t pow2;              /* 0 or 1 */
    const void *x;             /* [T,d] */
    int64_t x_stride;          /* elements from row to row; 0 = d */
    const float *static_scale; /* [1] or NULL */
    const float *scale_ub;     /* [1] or NULL: bounds amax */
    void *q;                   /* out E4M3 [T,d] */
    float *scale;              /* out, see epmoe_granularity_t */
} epmoe_quantize_fp8_args_t;
#define EPMOE_QUANTIZE_FP8_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_quantize_fp8_args_t)
EPMOE_API epmoe_status_t epmoe_quantize_fp8(const epmoe_quantize_fp8_args_t *args, epmoe_stream_t stream);

/* The values of a weight in any format, in fp32: w[e,n,k] as epmoe_weight_t defines it, columns in the order of x.
 * Errors: INVALID_ARGUMENT for sizes below 1, NULL pointers, a bad field of the weight, on the CPU a g_idx out of range
 * or, of W4, that is no permutation (on CUDA its values are then wrong), on CUDA data or w not aligned to 16 bytes, the
 * rest to 4. No aliasing.
 * Floor: bytes = the weight's + 4*E*N*K. */
typedef struct epmoe_dequant_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_experts; /* E; 0 = 1 */
    int32_t n;           /* N */
    int32_t k;           /* K */
    int32_t reserved;
    epmoe_weight_t weight; /* [E,N,K] */
    float *w;              /* out [E,N,K] */
} epmoe_dequant_args_t;
#define EPMOE_DEQUANT_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_dequant_args_t)
EPMOE_API epmoe_status_t epmoe_dequant(const epmoe_dequant_args_t *args, epmoe_stream_t stream);

/* A weight of 4-bit codes, or of 16 bits, as the tiles that products on CUDA compute on (EPMOE_STORAGE_TILES): values
 * are kept bit for bit. BF16, F16 and MXFP4 stay what they are; W4, GPTQ, AWQ and CT_W4 become W4. The layout is the
 * library's own and may change with its version. epmoe_pack_tiles_size gives the arrays' sizes and the weight argument
 * for a product, in which the caller sets where they are; the product then wants EPMOE_LAYOUT_PACKED.
 *   gated     rows 0..N/2-1 are gate and the others up rows of one product with an activation, whose bias then has gate
 *             and up in turns
 *   g_idx     of W4: the order of the columns stays with the caller, tiles have the same stored columns. Products on
 *             CUDA take one order for all rows, [E,K]: that of gate and up rows must be the same. Not of the others
 *   zeros     of W4: zero points, NULL when the weight has none (CT_W4 and W4)
 *   backend   CUDA packs from device memory to device memory, CPU within host memory, for a caller who copies the
 *             arrays to a device; they hold the same bytes
 * Errors: INVALID_ARGUMENT for sizes below 1, N odd with gated, another format, a weight in tiles, a g_idx of GPTQ or
 * CT_W4, NULL pointers, on CUDA out arrays that are not aligned to 16 bytes and weights not to 4, those of 16 bits not
 * to 16; NOT_SUPPORTED for groups and K that products on CUDA do not take, of 16 bits for K that is no multiple of 64
 * and, with gated, N that is none of 16.
 * No aliasing. Floor: bytes = the weight's + those of the tiles. */
typedef struct epmoe_pack_tiles_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_experts; /* E; 0 = 1 */
    int32_t n;           /* N */
    int32_t k;           /* K */
    int32_t gated;       /* 0 or 1 */
    int32_t reserved;
    epmoe_weight_t weight; /* [E,N,K] */
    void *data;            /* out */
    void *scales;          /* out; may be NULL where epmoe_pack_tiles_size says 0 bytes */
    void *zeros;           /* out; as scales */
} epmoe_pack_tiles_args_t;
#define EPMOE_PACK_TILES_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_pack_tiles_args_t)

typedef struct epmoe_pack_tiles_size_t {
    size_t struct_size;
    int64_t data_bytes;
    int64_t scales_bytes;
    int64_t zeros_bytes;  /* 0: there are none */
    epmoe_weight_t tiles; /* format, group_size, scales_dtype and storage of what is packed; no pointers */
} epmoe_pack_tiles_size_t;
#define EPMOE_PACK_TILES_SIZE_INIT EPMOE_STRUCT_INIT(epmoe_pack_tiles_size_t)

/* Of the arrays of all experts. Of the weight's pointers only zeros is looked at: whether there is one. */
EPMOE_API epmoe_status_t epmoe_pack_tiles_size(const epmoe_pack_tiles_args_t *args, epmoe_pack_tiles_size_t *size);
EPMOE_API epmoe_status_t epmoe_pack_tiles(const epmoe_pack_tiles_args_t *args, epmoe_stream_t stream);

/* ---------------------------------------------------------------------------------------------------- dense ops */

/* The ops of a decoder layer around its experts. On CUDA positions and slots are aligned to their dtype and scales to
 * 4 bytes; what is out of range there is counted, and the next host call reports it.
 * Strides are 64-bit element counts from row to row; 0 = the rows lie side by side. */

/* Root mean square normalisation (Zhang and Sennrich 2019), of a residual sum when there is a residual:
 *     s[t,:] = residual ? round(x[t,:] + residual[t,:], dtype) : x[t,:]; residual[t,:] = s[t,:]
 *     n[t,i] = s[t,i] * rsqrt(mean over i of s[t,i]^2 + eps) * (w[i] + (weight_offset ? 1 : 0))
 *     y[t,:] = round(n[t,:], y_dtype)
 * with fp32 arithmetic in the order written, the sum of squares wide enough that no finite row overflows it, and the
 * rounded s is what is squared and normalised. With quant y is E4M3 and has the bits that quantising the rounded rows
 * would give: amax and codes are of round(n, dtype), scale = max(amax / 448, 2^-126), saturating, NaN = 0x7F; a NaN
 * does not count for amax.
 * y may alias x with the same stride and type. residual is read and written; it must not alias x or y.
 * A NaN or infinity spreads to its own row only.
 * Errors: INVALID_ARGUMENT for sizes below 1, a negative eps, a stride below the row, another y_dtype, y == x with
 * another stride or type, residual == x or y, NULL pointers, on the CPU also for a static scale that is not finite and
 * above 0.
 * Floor: bytes = T*d*(b + b_y (+ 2*b with a residual)) + d*b_w, and the scales. */
typedef struct epmoe_rms_norm_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;         /* T */
    int32_t hidden;             /* d */
    epmoe_dtype_t dtype;        /* of x and residual: F32, BF16, F16 */
    epmoe_dtype_t weight_dtype; /* 0 = dtype */
    const void *x;              /* [T,d] */
    int64_t x_stride;
    void *residual; /* in and out [T,d], or NULL */
    int64_t residual_stride;
    const void *weight;    /* [d] */
    float eps;             /* 0 = 1e-6 */
    int32_t weight_offset; /* 0 or 1: the weight counts as 1 + w, added in fp32 */
    void *y;               /* out [T,d] */
    int64_t y_stride;
    epmoe_granularity_t quant; /* 0 = none: y is not quantised */
    const float *static_scale; /* [1]: with TENSOR, and only then */
    float *scale;              /* out: with TOKEN and BLOCK128, see epmoe_granularity_t */
    epmoe_dtype_t y_dtype;     /* of y; 0 = dtype, with quant F8_E4M3. Without quant and of F32 also BF16 or F16 */
} epmoe_rms_norm_args_t;
#define EPMOE_RMS_NORM_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_rms_norm_args_t)
EPMOE_API epmoe_status_t epmoe_rms_norm(const epmoe_rms_norm_args_t *args, epmoe_stream_t stream);

/* A projection by one matrix w [N,K], the rows of x and y side by side:
 *     xq[t,:] = x_quant ? the values of the codes and scales that epmoe_quantize_fp8 makes of x[t,:] : x[t,:]
 *     y[t,n]  = round(sum over K of xq[t,k] * w[n,k] + bias[n], y_dtype)
 * with an fp32 sum, whose order is the kernel's own and on one device the same in every call with these sizes and
 * alignments. x of E4M3 holds such codes already, and x_scale their scales. For x of another type x_scale is only taken
 * with TENSOR, as the static scale to quantise with; without it scales come from x.
 *   x_quant     weight
 *   0           any format that epmoe_grouped_gemm takes with such x; E4M3 weights count as their values
 *   TENSOR,     FP8_BLOCK with group_size -1 and group_rows 1 (a scale per row) or -1 (one for all); scales F32, BF16
 *   TOKEN       or F16
 *   BLOCK128    FP8_BLOCK, as epmoe_grouped_gemm with fp8_activations takes it
 * On CUDA products without a bias go to cuBLASLt, where the process finds it at run time and x and w have the same
 * 16-bit type; the first call of a size chooses the algorithm, later ones reuse it. Everything else, and what cuBLASLt
 * has no algorithm for, is epmoe_grouped_gemm's with one expert.
 * A NaN of x stays in its row of y, one of w in its column. No aliasing. T = 0 is a no-op.
 * Errors: INVALID_ARGUMENT for T below 0, N or K below 1, an unknown enum, NULL pointers, a format or a granularity
 * outside the table, x of E4M3 without x_scale or x_quant, x_scale for x of another type unless x_quant is TENSOR, a
 * too small workspace; on the CPU a static x_scale that is not finite and above 0; on CUDA addresses not aligned to 16
 * bytes, x_scale to 4. NOT_SUPPORTED as in epmoe_grouped_gemm_args_t; TENSOR, TOKEN and x of E4M3 need on CUDA what
 * fp8_activations do there. Floor: bytes = T*K*b_x + N*K*b_w + T*N*b_y, and the scales and bias; flops = 2*T*N*K. */
typedef struct epmoe_linear_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;          /* T */
    int32_t n;                   /* N */
    int32_t k;                   /* K */
    epmoe_dtype_t x_dtype;       /* F32, BF16, F16, or F8_E4M3 with x_scale */
    epmoe_dtype_t y_dtype;       /* F32, BF16 or F16; 0 = x_dtype, or BF16 where that is F8_E4M3 */
    const void *x;               /* [T,K] */
    const float *x_scale;        /* see epmoe_granularity_t, or NULL */
    epmoe_weight_t weight;       /* [1,N,K] */
    const float *bias;           /* [N] or NULL */
    void *y;                     /* out [T,N] */
    epmoe_granularity_t x_quant; /* 0 = none: x is not quantised */
    int32_t reserved;
    void *workspace;
    int64_t workspace_bytes; /* at least epmoe_linear_workspace_size */
} epmoe_linear_args_t;
#define EPMOE_LINEAR_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_linear_args_t)
/* For a call with these sizes and types. Pointers are not read, but whether bias is NULL counts. */
EPMOE_API epmoe_status_t epmoe_linear_workspace_size(const epmoe_linear_args_t *args, int64_t *bytes);
EPMOE_API epmoe_status_t epmoe_linear(const epmoe_linear_args_t *args, epmoe_stream_t stream);

/* Which two columns of a head make pair i < rotary_dim / 2. */
typedef enum epmoe_rope_style_t {
    EPMOE_ROPE_NEOX = 0, /* i and i + rotary_dim / 2 */
    EPMOE_ROPE_GPTJ = 1, /* 2i and 2i + 1 */
} epmoe_rope_style_t;

/* Rotary position embedding (Su et al. 2021) in place. For pair i = (a, b) of every head, at the token's position p,
 * with c = cos_sin[p, i] and s = cos_sin[p, rotary_dim/2 + i] (inverse: -s):
 *     a' = a*c - b*s;  b' = b*c + a*s            fp32, rounded once
 * Columns from rotary_dim on are untouched. q and k may lie in one packed buffer.
 * Errors: INVALID_ARGUMENT for an odd rotary_dim, one above head_dim, sizes out of range, NULL pointers; on the CPU
 * also for a position outside [0, num_positions), and nothing is written; on CUDA such a token passes through.
 * Floor: bytes = 2*T*(H+Hk)*rotary_dim*b + T*(4*rotary_dim + bytes of a position). */
typedef struct epmoe_rope_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;   /* T */
    int32_t num_heads;    /* H */
    int32_t num_kv_heads; /* Hk; 0 with k NULL */
    int32_t head_dim;     /* D */
    int32_t rotary_dim;   /* 0 = D; even, at most D */
    epmoe_rope_style_t style;
    int32_t inverse;     /* 0 or 1: rotates back */
    epmoe_dtype_t dtype; /* F32, BF16, F16 */
    void *q;             /* in and out [T,H,D] */
    int64_t q_stride;    /* from token to token; 0 = H heads */
    void *k;             /* in and out [T,Hk,D], or NULL */
    int64_t k_stride;
    int64_t head_stride;           /* from head to head, of q and k; 0 = D */
    epmoe_dtype_t positions_dtype; /* I64 (0 = I64) or I32 */
    const void *positions;         /* [T] */
    const float *cos_sin;          /* [num_positions, rotary_dim]: first half cos, second half sin */
    int32_t num_positions;         /* P */
} epmoe_rope_args_t;
#define EPMOE_ROPE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_rope_args_t)
EPMOE_API epmoe_status_t epmoe_rope(const epmoe_rope_args_t *args, epmoe_stream_t stream);

/* RMSNorm of each head of q and k, then rotary position embedding, in place on the packed rows of a qkv projection:
 * heads 0..H-1 are q, the next Hk k, the last Hk v, which is untouched. The maths are those of epmoe_rms_norm over D
 * columns and of epmoe_rope; nothing is rounded between the two. Columns from rotary_dim on are normalised only.
 * Errors: as of the two.
 * Floor: bytes = 2*T*(H+Hk)*D*b + T*(4*rotary_dim + bytes of a position). */
typedef struct epmoe_qk_norm_rope_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;
    int32_t num_heads;    /* H */
    int32_t num_kv_heads; /* Hk */
    int32_t head_dim;     /* D */
    int32_t rotary_dim;   /* 0 = D; even, at most D */
    epmoe_rope_style_t style;
    epmoe_dtype_t dtype;           /* F32, BF16, F16 */
    epmoe_dtype_t weight_dtype;    /* 0 = dtype */
    void *qkv;                     /* in and out [T,H+2*Hk,D] */
    int64_t qkv_stride;            /* from token to token; 0 = H + 2*Hk heads */
    const void *q_weight;          /* [D] */
    const void *k_weight;          /* [D] */
    float eps;                     /* 0 = 1e-6 */
    int32_t weight_offset;         /* 0 or 1 */
    epmoe_dtype_t positions_dtype; /* I64 (0 = I64) or I32 */
    const void *positions;         /* [T] */
    const float *cos_sin;          /* as in epmoe_rope_args_t */
    int32_t num_positions;
} epmoe_qk_norm_rope_args_t;
#define EPMOE_QK_NORM_ROPE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_qk_norm_rope_args_t)
EPMOE_API epmoe_status_t epmoe_qk_norm_rope(const epmoe_qk_norm_rope_args_t *args, epmoe_stream_t stream);

/* How a model stretches its rotary frequencies f[i] = base^(-2i / rotary_dim) to longer contexts:
 *   LINEAR  f / factor
 *   LLAMA3  by wavelength 2*pi/f against L = original_positions: f above L / low_freq_factor becomes f / factor, below
 *           L / high_freq_factor stays, between the two a blend (Llama 3.1)
 *   YARN    f / factor where a dimension turns less than beta_slow times in L, f where it turns more than beta_fast
 *           times, a ramp between; cos and sin times the attention factor (Peng et al. 2023) */
typedef enum epmoe_rope_scaling_t {
    EPMOE_ROPE_SCALING_NONE = 0,
    EPMOE_ROPE_SCALING_LINEAR = 1,
    EPMOE_ROPE_SCALING_LLAMA3 = 2,
    EPMOE_ROPE_SCALING_YARN = 3,
} epmoe_rope_scaling_t;

/* Fills a cos_sin table on the host, in double precision, rounded once.
 * YARN's attention factor: attention_factor if given; with mscale and mscale_all_dim m(mscale) / m(mscale_all_dim),
 * where m(s) = 0.1 * s * ln(factor) + 1; otherwise m(1).
 * Errors: INVALID_ARGUMENT for an odd rotary_dim, a factor below 1, sizes and numbers out of range. */
typedef struct epmoe_rope_table_args_t {
    size_t struct_size;
    int32_t num_positions; /* P >= 1 */
    int32_t rotary_dim;    /* even, >= 2 */
    double base;           /* 0 = 10000 */
    epmoe_rope_scaling_t scaling;
    int32_t original_positions; /* L: LLAMA3 and YARN */
    double factor;              /* 0 = 1 */
    double low_freq_factor;     /* LLAMA3; 0 = 1 */
    double high_freq_factor;    /* LLAMA3; 0 = 4; at least low_freq_factor: equal, nothing is blended */
    double beta_fast;           /* YARN; 0 = 32 */
    double beta_slow;           /* YARN; 0 = 1 */
    double attention_factor;    /* YARN; 0 = as above */
    double mscale;              /* YARN; 0 = not given */
    double mscale_all_dim;      /* YARN; 0 = not given */
    int32_t no_truncate;        /* YARN: 1 = the ends of the ramp are not rounded to whole dimensions */
    float *cos_sin;             /* out [P, rotary_dim], host memory */
} epmoe_rope_table_args_t;
#define EPMOE_ROPE_TABLE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_rope_table_args_t)
EPMOE_API epmoe_status_t epmoe_rope_table(const epmoe_rope_table_args_t *args);

/* How the blocks of a paged KV cache are laid out: B blocks of S slots, Hk heads of D columns.
 *   V1   key [B,Hk,D/x,S,x], value [B,Hk,D,S]; x columns of a key are neighbours
 *   NHD  key and value [B,S,Hk,D]
 *   HND  key and value [B,Hk,S,D] */
typedef enum epmoe_cache_layout_t {
    EPMOE_CACHE_LAYOUT_V1 = 0,
    EPMOE_CACHE_LAYOUT_NHD = 1,
    EPMOE_CACHE_LAYOUT_HND = 2,
} epmoe_cache_layout_t;

/* Writes the key and value of token t to slot slots[t] of the cache: block slots[t] / S, place slots[t] mod S. Slot -1
 * is skipped and its rows are not read. Without F8_E4M3 a bit-exact copy; with it stored = E4M3(value / scale),
 * saturating, NaN = 0x7F. Slots other than -1 must be distinct (the CPU lets the later token win). value and
 * value_cache both NULL: keys alone, as MLA's attention reads them.
 *
 * Errors: INVALID_ARGUMENT for sizes out of range, V1 with D not a multiple of x, NULL pointers with T > 0; on the CPU
 * also for a slot outside [-1, B*S) and a scale that is not finite and above 0. Nothing is written then; on CUDA such
 * a slot is skipped.
 *
 * Floor: bytes = 2*T*Hk*D*(b + b_cache) + T * bytes of a slot. */
typedef struct epmoe_cache_write_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;   /* T: the number of slots; key and value may have more rows, which are not read */
    int32_t num_kv_heads; /* Hk */
    int32_t head_dim;     /* D */
    int32_t num_blocks;   /* B */
    int32_t block_size;   /* S */
    epmoe_cache_layout_t layout;
    int32_t key_pack;          /* x of V1; 0 = 16 bytes of cache_dtype */
    epmoe_dtype_t dtype;       /* of key and value: F32, BF16, F16 */
    epmoe_dtype_t cache_dtype; /* 0 = dtype, or F8_E4M3 */
    const void *key;           /* [T,Hk,D] */
    int64_t key_stride;        /* from token to token; 0 = Hk*D */
    const void *value;         /* [T,Hk,D] or NULL */
    int64_t value_stride;
    epmoe_dtype_t slots_dtype; /* I64 (0 = I64) or I32 */
    const void *slots;         /* [T] */
    void *key_cache;           /* out */
    void *value_cache;         /* out; NULL without value */
    int64_t key_block_stride;  /* from block to block; 0 = Hk*S*D */
    int64_t value_block_stride;
    const float *k_scale; /* [1] or NULL = 1; used with F8_E4M3 alone */
    const float *v_scale;
} epmoe_cache_write_args_t;
#define EPMOE_CACHE_WRITE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_cache_write_args_t)
EPMOE_API epmoe_status_t epmoe_cache_write(const epmoe_cache_write_args_t *args, epmoe_stream_t stream);

/* epmoe_rope, then epmoe_cache_write with the rotated k as key, in one pass and with the same bits: q and k are rotated
 * in place too. cache->key is NULL or rope->k, and its stride is rope's; backend, tokens, kv heads, head_dim and dtype
 * of the two agree, and rope->head_stride is head_dim. Errors: as of the two, before anything is written. On CUDA a
 * token whose position is outside the table is cached unrotated. Floor: bytes = those of the two, less
 * T*Hk*rotary_dim*b: the rotated keys are not read again. */
EPMOE_API epmoe_status_t epmoe_rope_cache_write(const epmoe_rope_args_t *rope, const epmoe_cache_write_args_t *cache,
                                                epmoe_stream_t stream);

/* ----------------------------------------------------------------------------------------- attention and sampling */

#define EPMOE_MAX_HEAD_DIM 576 /* of keys in MLA: latent 512 + rope 64 */

/* Attention of new tokens over a paged cache that already holds their own keys and values: prefill, decode and any mix
 * of both in one call. Rows query_start[b] .. query_start[b+1]-1 of q belong to sequence b and are its last tokens: the
 * i-th of n is at position p = seq_lens[b] - n + i. Key j of sequence b lies in slot j mod S of block
 * block_table[b, j / S]; values have Dv columns in place of D. Query head h reads cache head h / (H / Hk).
 *     s[j]   = scale * (q[t,h,:] . key[j,:])                for p - window < j <= p (window 0: for all j <= p)
 *     o[t,h] = sum over j of exp(s[j]) * value[j,:] / (sum over j of exp(s[j]) + exp(sinks[h])),  fp32, rounded once
 *   - An F8_E4M3 cache holds key / k_scale and value / v_scale.
 *   - value_cache NULL, value_dim given: the values are the first Dv columns of the keys, as in MLA's absorbed decode:
 *     one cache head, D = latent + rope, Dv = latent, scale that of the head before absorption.
 *   - Entries of block_table are read only for blocks that hold a visible key, so those past the end of a sequence and
 *     those that have left the window may be anything. Slots without a visible key are never used, not even as NaN.
 *   - A row of a sequence of length 0 (the padding of a batch), or whose scores are all -inf, is zeros. A NaN in q, a
 *     visible key or value reaches only the rows that see it. Rows of o from query_start[B] on are not written.
 * Errors: INVALID_ARGUMENT for sizes out of range, H not divisible by Hk, D not divisible by x, Dv above D or 0
 * without value_cache, a scale that is not finite; on the CPU also for query_start that does not begin at 0, decreases
 * or passes T, more queries than a sequence of length above 0 has tokens, a length outside [0, M * S], a block that is
 * read outside [0,N), k_scale or v_scale not finite and above 0. On CUDA a block outside [0,N) counts as one of zeros
 * and is reported as a bad id; the other data must be right. There the order of sums follows from the sizes in this
 * struct and the lengths: the bits of a row do not depend on the data of other rows, but a call of other sizes may cut
 * the contexts otherwise. CUDA: tensors and workspace aligned to 16 bytes, the other arrays to 4.
 * Floor: bytes = T*H*(D+Dv)*b + seen*Hk*(D+Dv)*c, seen = cached tokens that some query sees, c = bytes per cached
 * element (MLA: D in place of D+Dv there); flops = 2*(D+Dv)*H*(visible pairs of query and key). */
typedef struct epmoe_attention_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_tokens;        /* T: rows of q and o */
    int32_t num_seqs;          /* B */
    int32_t num_heads;         /* H */
    int32_t num_kv_heads;      /* Hk; 0 = H */
    int32_t head_dim;          /* D: 1..EPMOE_MAX_HEAD_DIM */
    int32_t value_dim;         /* Dv: 1..EPMOE_MAX_HEAD_DIM; 0 = D */
    int32_t num_blocks;        /* N */
    int32_t block_size;        /* S: any from 1 on */
    int32_t max_blocks;        /* M: columns of block_table */
    epmoe_dtype_t dtype;       /* of q and o: F32, BF16, F16 */
    epmoe_dtype_t cache_dtype; /* dtype or F8_E4M3; 0 = dtype */
    epmoe_cache_layout_t layout;
    int32_t key_pack; /* x of V1; 0 = 16 / bytes per cached element */
    int32_t window;   /* 0 = none */
    float scale;      /* 0 = D^-0.5 */
    const void *q;    /* [T,H,D] */
    int64_t q_stride; /* elements from token to token; 0 = H*D */
    const void *key_cache;
    const void *value_cache;    /* or NULL: see above */
    int64_t key_block_stride;   /* elements from block to block; 0 = S*Hk*D */
    int64_t value_block_stride; /* 0 = S*Hk*Dv */
    const float *k_scale;       /* [1] or NULL = 1; used with F8_E4M3 alone */
    const float *v_scale;       /* the same; not used without value_cache */
    const int32_t *block_table; /* [B,M] */
    const int32_t *seq_lens;    /* [B] */
    const int32_t *query_start; /* [B+1] */
    const float *sinks;         /* [H] or NULL */
    void *o;                    /* out [T,H,Dv] */
    void *workspace;            /* CUDA: where parts of long contexts meet, so that few sequences fill the device; */
    int64_t workspace_bytes;    /* with less than epmoe_attention_workspace_size they are cut into fewer parts */
} epmoe_attention_args_t;
#define EPMOE_ATTENTION_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_attention_args_t)
/* Reads no device memory; lengths up to max_blocks * block_size are provided for. 0 on the CPU. */
EPMOE_API epmoe_status_t epmoe_attention_workspace_size(const epmoe_attention_args_t *args, int64_t *bytes);
EPMOE_API epmoe_status_t epmoe_attention(const epmoe_attention_args_t *args, epmoe_stream_t stream);

#define EPMOE_MAX_VOCAB (1 << 22)

/* One token per row of logits. In this order:
 *   temperature  token i weighs w[i] = exp((logit[i] - largest logit) / temperature). temperature 0: the largest logit,
 *                the lower id of equals; nothing below applies and uniform is not read
 *   top_k        the k largest logits stay; of equals at the edge the lower ids
 *   top_p        of these, by descending logit and then ascending id, the fewest whose weights reach top_p of their sum
 *   min_p        of these, those with w[i] >= min_p
 *   draw         the first of these, by id, at which the running sum of weights exceeds uniform times the total
 * Weights are fixed-point numbers, trunc(2^40 * fp32 exp): sums are exact in any order, so that every kernel and thread
 * count draws the same token. A token below 2^-40 of the likeliest is never drawn.
 * NaN counts as -inf, +inf as the largest finite number. A row of nothing but -inf gets token -1.
 * Errors: INVALID_ARGUMENT for V outside 1..EPMOE_MAX_VOCAB, temperature negative or not finite, top_k below -1, top_p
 * or min_p outside [0,1] or NaN (all also per row on the CPU), uniform outside [0,1] or NaN on the CPU.
 * Floor: bytes = B*V*b. */
typedef struct epmoe_sample_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_rows;           /* B */
    int32_t vocab_size;         /* V */
    epmoe_dtype_t logits_dtype; /* F32 (0 = F32), BF16 or F16 */
    const void *logits;         /* [B,V] */
    int64_t logits_stride;      /* elements from row to row; 0 = V */
    const float *uniform;       /* [B] in [0,1]; 1 draws the last token that stays; may be NULL with temperature 0 for
                                   all rows */
    float temperature;          /* 0 = greedy */
    int32_t top_k;              /* 0, -1 or >= V = all */
    float top_p;                /* 0 = 1 = all */
    float min_p;                /* 0 = all */
    const float *temperature_rows; /* these four: [B] or NULL, one value per row in place of the one above */
    const int32_t *top_k_rows;
    const float *top_p_rows;
    const float *min_p_rows;
    int32_t *tokens; /* out [B] */
} epmoe_sample_args_t;
#define EPMOE_SAMPLE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_sample_args_t)
EPMOE_API epmoe_status_t epmoe_sample(const epmoe_sample_args_t *args, epmoe_stream_t stream);

/* Speculative decoding: accepts or rejects a chain of G drafted tokens, so that every token has the target's
 * distribution (Leviathan et al. 2023; Chen et al. 2023). Per row, for g ascending:
 *     draft g is accepted if uniform[g] * draft_probs[g,id] < target_probs[g,id], that is u < p/q, compared exactly
 *     the first rejected one is replaced by a draw from max(target_probs[g] - draft_probs[g], 0)
 *     if none is rejected, a draw from target_probs[G] follows: the bonus token
 * and the row ends. Both draws use uniform[G]: the first token, by id, at which the running sum exceeds uniform[G]
 * times the total, in fixed point as in epmoe_sample. Where no difference is positive the draw is from target_probs[g].
 *   - draft id -1 ends the row's drafts: the bonus is then drawn from target_probs at that place, and what stands
 *     behind it is not read.
 *   - draft_probs NULL: the drafter was certain, q = 1 at its id and 0 elsewhere.
 *   - In a draw probabilities are clamped to [0,1] and NaN counts as 0; in an accept test a NaN rejects. A draw from
 *     nothing but zeros gives token -1.
 * Errors: INVALID_ARGUMENT for G < 0, V outside 1..EPMOE_MAX_VOCAB, on the CPU an id outside [-1,V) in front of the
 * first -1, uniform outside [0,1] or NaN. On CUDA such an id counts as -1.
 * Floor: bytes = 8*B*V (difference) or 4*B*V (bonus), plus 20*B*(G+1). */
typedef struct epmoe_spec_verify_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t num_rows;          /* B */
    int32_t num_drafts;        /* G, may be 0 */
    int32_t vocab_size;        /* V */
    const int32_t *draft_ids;  /* [B,G] */
    const float *draft_probs;  /* [B,G,V] or NULL */
    const float *target_probs; /* [B,G+1,V] */
    const float *uniform;      /* [B,G+1] in [0,1]: the accept tests, then the draw */
    int32_t *tokens;           /* out [B,G+1]: accepted drafts, the drawn token, then -1 */
    int32_t *accepted;         /* out [B]: drafts accepted */
} epmoe_spec_verify_args_t;
#define EPMOE_SPEC_VERIFY_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_spec_verify_args_t)
EPMOE_API epmoe_status_t epmoe_spec_verify(const epmoe_spec_verify_args_t *args, epmoe_stream_t stream);

/* ------------------------------------------------------------------------------------------------ communication */

typedef struct epmoe_comm epmoe_comm_t; /* the ranks of one expert-parallel group */
typedef struct epmoe_ep epmoe_ep_t;     /* the buffers and plan of one dispatch/combine pair on a communicator */
struct ncclComm;                        /* NCCL's communicator, by NCCL's own tag */

typedef enum epmoe_transport_t {
    EPMOE_TRANSPORT_AUTO = 0,  /* LOCAL for one rank, MPI on the CPU and where ranks share a device, otherwise the first
                                  that all ranks can use of P2P, NCCL and MPI */
    EPMOE_TRANSPORT_LOCAL = 1, /* one rank */
    EPMOE_TRANSPORT_MPI = 2,  /* host buffers through the bootstrap's exchange callbacks (MPI's, or the caller's); CUDA:
                                 by way of page-locked memory, also where ranks share a device */
    EPMOE_TRANSPORT_NCCL = 3, /* CUDA, a device for every rank */
    EPMOE_TRANSPORT_P2P = 4,  /* CUDA: kernels plan, and reach into the memory of the other ranks' devices (NVLink), all
                                 on one host, at most 32 ranks; ranks may share a device, if they are processes */
} epmoe_transport_t;
EPMOE_API const char *epmoe_transport_string(epmoe_transport_t transport);

/* A piece of host memory that goes to, or comes from, one peer. */
typedef struct epmoe_segment_t {
    int32_t peer;
    int32_t reserved; /* 0 */
    void *data;
    int64_t bytes; /* >= 0 */
} epmoe_segment_t;

/* What the library asks of the process launcher, as callbacks. epmoe_comm_create_mpi (epmoe_mpi.h) fills one with MPI.
 * All callbacks return 0 for success and run on the thread that called the library. With one rank all may be NULL, with
 * more all_gather is needed, and both halves of the exchange: headers and ids take that way over MPI and NCCL.
 *   all_gather       recv[i*bytes .. ) = rank i's send; every rank calls it with the same bytes. Waits at most
 *                    timeout_s: 0 done, 1 timed out, 2 failed; then *failed_peer (-1 before the call) may name a rank,
 *                    and epmoe_set_last_error may say more. After a failure send and recv are touched no more.
 *   exchange_begin   starts sending and receiving all segments and returns at once: 0 started, 2 failed. Segments
 *                    between a pair of ranks match in order and are equally long. Several exchanges never overlap, and
 *                    no all_gather comes between the halves. Arrays and data stay valid until exchange_finish returns.
 *   exchange_finish  waits until all segments have been sent and received, at most timeout_s; returns and *failed_peer
 *                    as for all_gather. After a failure the library keeps the buffers for the life of the process, so
 *                    that a transport that still moves data does no harm.
 *   release          called once, from epmoe_comm_destroy or a failing epmoe_comm_create. `failed` is not 0 when ranks
 *                    may be out of step: nothing may then wait for a peer. */
typedef struct epmoe_bootstrap_t {
    size_t struct_size;
    int32_t rank;
    int32_t size;
    void *ctx;
    int32_t (*all_gather)(void *ctx, const void *send, void *recv, int64_t bytes, double timeout_s,
                          int32_t *failed_peer);
    int32_t (*exchange_begin)(void *ctx, const epmoe_segment_t *sends, int32_t num_sends, const epmoe_segment_t *recvs,
                              int32_t num_recvs);
    int32_t (*exchange_finish)(void *ctx, double timeout_s, int32_t *failed_peer);
    void (*release)(void *ctx, int32_t failed);
} epmoe_bootstrap_t;
#define EPMOE_BOOTSTRAP_INIT EPMOE_STRUCT_INIT(epmoe_bootstrap_t)

typedef struct epmoe_comm_config_t {
    size_t struct_size;
    epmoe_transport_t transport;
    epmoe_backend_t backend;
    int32_t device;   /* CUDA device ordinal; -1, which INIT sets, = local rank modulo the device count, where the local
                         rank counts the lower ranks that see the same devices of the same host */
    double timeout_s; /* longest wait for a peer before a call fails; 0 = 30 */
    struct ncclComm *nccl_comm; /* CUDA, optional, borrowed until destroy: carries transport NCCL, on its own device
                                   whatever `device` says. It is never aborted or destroyed: after a failure work that
                                   waits for a peer may be left on it, and if it was made blocking its owner's
                                   settings bound the waits, not timeout_s */
} epmoe_comm_config_t;
#ifdef __cplusplus
#define EPMOE_COMM_CONFIG_INIT                                                                                         \
    [] {                                                                                                               \
        epmoe_comm_config_t epmoe_init_ = epmoe_comm_config_t();                                                       \
        epmoe_init_.struct_size = sizeof(epmoe_comm_config_t);                                                         \
        epmoe_init_.device = -1;                                                                                       \
        return epmoe_init_;                                                                                            \
    }()
#else
#define EPMOE_COMM_CONFIG_INIT                                                                                         \
    {                                                                                                                  \
        .struct_size = sizeof(epmoe_comm_config_t), .device = -1                                                       \
    }
#endif

/* Makes a communicator. Collective over the bootstrap's ranks; may block up to timeout_s. bootstrap NULL = one rank, or
 * those of config->nccl_comm, whose host data then takes its way over NCCL too. config NULL = defaults with device -1;
 * with bootstrap NULL too the device is the thread's current one. The structs are copied; bootstrap->ctx must live
 * until `release`. On success the communicator owns the bootstrap; on failure *comm is NULL and `release` has been
 * called.
 * CUDA: makes the device current in the calling thread, where it must be so in every call on the communicator and its
 * objects (BAD_STATE otherwise). AUTO takes MPI where ranks share a device, see epmoe_comm_ranks_per_device. Where
 * every rank has its own it takes P2P, unless ranks are on several hosts, more than 32, or one cannot map the memory of
 * another, which is tried; then NCCL where every rank's build has it, then MPI. With nccl_comm it takes NCCL. All ranks
 * take the same, also when only one of them cannot use P2P.
 * Errors: MISMATCH (all ranks, naming field, ranks and values) when configs or backends differ; NOT_SUPPORTED for a
 * transport that some rank cannot use, such as NCCL where ranks share a device: before any NCCL communicator is made;
 * TIMEOUT. */
EPMOE_API epmoe_status_t epmoe_comm_create(const epmoe_bootstrap_t *bootstrap, const epmoe_comm_config_t *config,
                                           epmoe_comm_t **comm);
/* Local; waits for no peer (NCCL's own destroy may, and P2P's until all ranks destroy theirs, at most timeout_s). NULL
 * is legal, so is a communicator that has failed. Objects made on the communicator must be destroyed before it. */
EPMOE_API void epmoe_comm_destroy(epmoe_comm_t *comm);
EPMOE_API int32_t epmoe_comm_rank(const epmoe_comm_t *comm);
EPMOE_API int32_t epmoe_comm_size(const epmoe_comm_t *comm);
EPMOE_API epmoe_transport_t epmoe_comm_transport(const epmoe_comm_t *comm);
/* The largest number of ranks that share one device: 1 when every rank has its own, 0 on the CPU. Where it is above 1
 * AUTO takes MPI, P2P must be asked for, and times say nothing about the hardware. */
EPMOE_API int32_t epmoe_comm_ranks_per_device(const epmoe_comm_t *comm);
/* The first failure that made the communicator unusable (a timeout, a transport failure), OK while it is healthy.
 * After it, every collective call returns BAD_STATE at once. Errors that all ranks agreed on (MISMATCH, CAPACITY,
 * PEER with a peer's bad argument) leave it healthy. Over P2P, where calls only enqueue, the device finds all of
 * these, and each makes it unusable: the host hears of it from the next call, or from this one. Local, never
 * blocks. */
EPMOE_API epmoe_status_t epmoe_comm_get_async_error(const epmoe_comm_t *comm);
/* recv[i*bytes ..) = send of rank i. Host memory, collective, waits at most timeout_s. For small control data. */
EPMOE_API epmoe_status_t epmoe_comm_all_gather(epmoe_comm_t *comm, const void *send, void *recv, int64_t bytes);
/* Collective: OK if every rank passes OK; otherwise each failing rank gets its own status back and every other rank
 * ERROR_PEER with a message naming the first failing rank and its error text. */
EPMOE_API epmoe_status_t epmoe_comm_agree(epmoe_comm_t *comm, epmoe_status_t local);

/* Experts of rank r of R: a contiguous block; the first E mod R ranks own one more. R may exceed E. */
EPMOE_API epmoe_status_t epmoe_expert_range(int32_t num_experts, int32_t size, int32_t rank, int32_t *first,
                                            int32_t *count);

typedef struct epmoe_ep_config_t {
    size_t struct_size;
    int32_t num_experts;
    int32_t top_k;
    int32_t hidden;
    int32_t max_tokens;       /* this rank's bound of T; may differ per rank */
    epmoe_dtype_t dtype;      /* of x and y: F32, BF16, F16 */
    epmoe_dtype_t wire_dtype; /* of x on its way out: 0 = dtype, or F8_E4M3: rows travel as codes and scales of
                                 epmoe_quantize_fp8, BLOCK128, and what the experts of every rank get, the own one and
                                 the only one too, is code times scale rounded to dtype */
    int64_t
        capacity; /* most rows this rank accepts per dispatch; 0 = the sum of max_tokens of all ranks, the worst case */
    int32_t comm_sms; /* transport P2P: most multiprocessors that dispatch and combine take, on this rank; 0 = all */
    const int32_t *placement; /* host [num_physical]: the expert of which each physical expert is a copy, every expert
                                 at least once; read by create alone. NULL = expert e is physical expert e */
    int32_t num_physical; /* P, of all ranks together, E..EPMOE_MAX_EXPERTS: rank r has those of epmoe_expert_range(P,
                             size, r). 0 = num_experts, which it must be without a placement */
    epmoe_transport_t transport; /* for epmoe_ep_buffer_size alone: whose buffers; AUTO = the most of all */
} epmoe_ep_config_t;
#define EPMOE_EP_CONFIG_INIT EPMOE_STRUCT_INIT(epmoe_ep_config_t)

/* Collective. All fields but max_tokens, capacity, comm_sms and transport must agree (MISMATCH otherwise, on every
 * rank), the placement element by element. INVALID_ARGUMENT for a field out of its range, a wire_dtype that is neither
 * of the two, or a placement that leaves out an expert. The communicator must outlive the object. On failure *ep is
 * NULL on every rank.
 * With a placement the ids given to dispatch still name experts; the ids that a rank receives name its physical
 * experts, counted from its first. Which copy of an expert a token takes: the candidates are the copies on the token's
 * own rank if there are any, otherwise all copies; of these n, in ascending order, number (t + rank) mod n, t the
 * token's index in the call. So the same call always takes the same copies, and no rank asks another.
 * Bits: a rank sums the experts that it has of a token, and combine adds the ranks' sums. So y may differ in its last
 * bits between two placements, or when a token has another index in the call, as it may between two numbers of ranks;
 * never from run to run or from transport to transport. */
EPMOE_API epmoe_status_t epmoe_ep_create(epmoe_comm_t *comm, const epmoe_ep_config_t *config, epmoe_ep_t **ep);
EPMOE_API void epmoe_ep_destroy(epmoe_ep_t *ep); /* local; NULL is legal */
/* Bytes of buffers that epmoe_ep_create would take over config.transport on a rank that may receive `max_recv_rows`
 * rows. Local. CUDA: device memory is at most that; transport MPI takes up to as much again of page-locked memory. P2P,
 * which keeps no rows to be sent, takes less than the others but for the smallest sizes; that which peers map is whole
 * pages of 2 MiB, which the device gets back when all ranks have destroyed the object, with the next epmoe_ep_create or
 * the communicator's end.
 * INVALID_ARGUMENT for a field out of its range, an unknown transport, a size below 1, above 1 over LOCAL or above 32
 * over P2P, max_recv_rows below 0 or above INT32_MAX, and NULL pointers. */
EPMOE_API epmoe_status_t epmoe_ep_buffer_size(const epmoe_ep_config_t *config, int32_t size, int64_t max_recv_rows,
                                              int64_t *bytes);

typedef struct epmoe_dispatch_args_t {
    size_t struct_size;
    int32_t num_tokens;    /* T <= max_tokens, may be 0 */
    int32_t reuse_routing; /* 1: T and ids, which are still to be given, are those of the previous dispatch of this
                              object, on every rank: no tokens are routed or counted. Weights may be others, and travel
                              with the rows; over MPI and NCCL ids do not, over P2P they do. INVALID_ARGUMENT after a
                              dispatch that failed. */
    const void *x;         /* [T,d] */
    const int32_t *ids;    /* [T,k] global expert ids, -1 = unused */
    const float *weights;  /* [T,k]; the weight of an unused slot is not read */
    const int32_t *num_tokens_dev; /* optional, transport P2P only: the actual T, at most num_tokens, in device memory;
                                      with reuse_routing not read */
    int32_t max_rank_tokens; /* a promise, the same on all ranks: none has more tokens in this dispatch; 0 = none has
                                more than its max_tokens. Over P2P, where the host knows no counts, what follows is
                                made for size times as many rows */
    int64_t *expert_load;    /* optional [E], in the tensors' kind of memory: the number of slots of this rank's tokens
                                that chose each expert is added to what is there; with reuse_routing nothing is. An
                                error found before rows travel adds nothing; over P2P the device may find one later */
} epmoe_dispatch_args_t;
#define EPMOE_DISPATCH_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_dispatch_args_t)

/* Rows this rank received: one per (token, this rank) whatever the number of the token's experts here, ordered by
 * source rank, then token. The pointers are owned by the object and valid until the next dispatch or destroy. With one
 * rank nothing is copied: every token is a row, also one without experts, and x, ids and weights are the caller's own,
 * which must stay unchanged until combine; with wire_dtype F8_E4M3 x is the object's, rounded, with a placement the ids
 * are. */
typedef struct epmoe_dispatch_result_t {
    size_t struct_size;
    int32_t max_rows; /* bound of *num_rows */
    int32_t reserved;
    const int32_t *num_rows; /* [1], same memory kind as the tensors */
    const void *x;           /* [max_rows,d] */
    const int32_t *ids;      /* [max_rows,k]: local expert ids (0 = first expert of this rank, with a placement its
                                first physical one), -1 = not here */
    const float *weights;    /* [max_rows,k]; with more than one rank 0 where the id is -1 */
    void *y;                 /* [max_rows,d] of epmoe_ep_partial_dtype: where the caller puts each row's sum over the
                                local experts, for combine; may be written only between dispatch and combine */
} epmoe_dispatch_result_t;
#define EPMOE_DISPATCH_RESULT_INIT EPMOE_STRUCT_INIT(epmoe_dispatch_result_t)

/* Sends every token to each rank that owns one of its experts: once per rank. Collective, with T different per rank.
 * An error of one rank (bad id, T > max_tokens, NULL) reaches all: its own status there, ERROR_PEER elsewhere;
 * CAPACITY on all ranks when one would receive too many rows. The object stays usable after these. A dispatch without
 * a combine is dropped by the next one, if all ranks do so.
 * CPU: blocks until the rows are here.
 * CUDA, one rank: only enqueues. CUDA, transports MPI and NCCL: the plan is made on the host, which waits for `stream`
 * to come to ids and weights, and blocks until no peer is needed any more: all waits are bounded by timeout_s, work
 * that the stream had before included. Not capturable: on a stream that is being captured NOT_SUPPORTED, as an error of
 * this rank that reaches all, and the capture is left as it was.
 * CUDA, transport P2P: only enqueues, and can be captured. Waits are the stream's, and end within timeout_s. Ids that
 * do not exist count as -1 and are reported as those of ops are. What concerns all ranks (bad arguments of one, too
 * many rows, reused routing on one alone, a timeout) is found by the device: the dispatch brings no rows, its combine
 * writes nothing, and the communicator has failed on every rank; see epmoe_comm_get_async_error. The rank with the bad
 * arguments has its error at once. Objects of a communicator may be used on different streams, each on one. A call on
 * the wrong device, and one with bad arguments during a capture, has not taken place. */
EPMOE_API epmoe_status_t epmoe_dispatch(epmoe_ep_t *ep, const epmoe_dispatch_args_t *args,
                                        epmoe_dispatch_result_t *result, epmoe_stream_t stream);

typedef struct epmoe_combine_args_t {
    size_t struct_size;
    const void *shared;   /* [T,d] f32 or NULL: added after the ranks' rows */
    const void *residual; /* [T,d] of dtype or NULL: added last */
    void *y;              /* out [T,d] of dtype; may alias residual */
} epmoe_combine_args_t;
#define EPMOE_COMBINE_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_combine_args_t)

/* Brings the partial rows of the last dispatch home: y[t,:] = round(sum over ranks ascending of their row for t
 * + shared + residual), fp32. Collective; pairs with exactly one dispatch (BAD_STATE otherwise). A bad argument on one
 * rank is an error there alone: its rows still go home to the others.
 * CUDA: waits as dispatch does, then enqueues the sum. NOT_SUPPORTED in a capture (BAD_STATE for a wrong current
 * device) means that the call has not taken place: peers wait until it does. P2P only enqueues. Partial rows travel as
 * epmoe_ep_partial_dtype: BF16 for BF16, F32 otherwise; with one rank F32 always. */
EPMOE_API epmoe_status_t epmoe_combine(epmoe_ep_t *ep, const epmoe_combine_args_t *args, epmoe_stream_t stream);
EPMOE_API epmoe_dtype_t epmoe_ep_partial_dtype(const epmoe_ep_t *ep);

/* Plans a placement for a load, such as expert_load summed over ranks and calls. Pure host code, and deterministic.
 *   load           [E], each >= 0
 *   num_physical   P, E..EPMOE_MAX_EXPERTS
 *   placement      out [P], as in epmoe_ep_config_t
 * Copies: one of each expert; each further one is of the expert with the most load per copy (equal: fewer copies first,
 * then the lower id) among those that have fewer copies than there are ranks, if any. Ranks: the copies by descending
 * share of load, each to a rank that has room and, where there is such a one, no copy of that expert yet: of these to
 * the one with the least load so far (equal: the lower). Within a rank experts ascend. Where the contiguous blocks of
 * epmoe_expert_range(E, size, r) would leave the busiest rank with less load, the plan is these blocks, filled up with
 * copies that do not raise it; with P = E also where they are as good. So the busiest rank's load is at most
 * that without a placement, provided that the copies of an expert share its load evenly.
 * INVALID_ARGUMENT for a size out of its range or a negative load. */
EPMOE_API epmoe_status_t epmoe_placement_plan(const int64_t *load, int32_t num_experts, int32_t num_physical,
                                              int32_t size, int32_t *placement);

/* ------------------------------------------------------------------------------------------------- layer config */

/* Shape and rules of one MoE block. num_experts 0 describes a dense MLP: only the shared expert is there, and the
 * router fields are ignored. */
typedef struct epmoe_layer_config_t {
    size_t struct_size;
    int32_t hidden;       /* d */
    int32_t intermediate; /* f of the routed experts */
    int32_t num_experts;  /* E */
    int32_t top_k;        /* k */
    /* router, as in epmoe_topk_args_t */
    epmoe_scoring_t scoring;
    int32_t renormalize;
    float routed_scale; /* 0 = 1 */
    int32_t n_group;
    int32_t topk_group;
    epmoe_group_score_t group_score;
    int32_t router_has_bias;    /* fp32 bias added to the logits */
    int32_t has_selection_bias; /* fp32 bias of the choice */
    int32_t weight_on_input;    /* 1: the router weight multiplies the expert's input */
    /* experts */
    epmoe_activation_t activation;
    float alpha;
    float limit;
    int32_t expert_has_bias;
    /* shared expert: added unscaled, or times sigmoid(x . shared_gate) */
    int32_t shared_intermediate; /* 0 = none */
    int32_t shared_gated;
    /* how it runs */
    epmoe_dtype_t dtype;          /* of x and y; 0 = BF16 */
    epmoe_format_t weight_format; /* of random weights; 0 = that of dtype. epmoe_checkpoint_layer_config gives that of
                                     quantised experts. Loaded weights keep their format (GPTQ, AWQ and CT_W4 as W4),
                                     but on CUDA plain ones take dtype's (but see router_dtype) */
    int32_t max_tokens;           /* this rank's bound of T per forward; 0 = 4096 */
    int64_t capacity;             /* see epmoe_ep_config_t */
    int32_t weight_group;         /* of a quantised weight_format: columns per scale, 0 = 128, -1 = one group */
    int32_t fp8_activations;      /* of FP8_BLOCK weights: 1 = x and h are first quantised, 128 columns per scale, as in
                                     epmoe_experts_args_t, -1 = they are not; 0 = where that is faster: on CUDA devices
                                     of compute capability 9.0, for weights that the kernel takes and more than a few
                                     tokens */
    float router_jitter;          /* SPARSE_MIXER; 0 = 0.01 */
    epmoe_dtype_t wire_dtype;     /* of the routed experts' x, as in epmoe_ep_config_t, with one rank too: 0 = dtype, or
                                     F8_E4M3. Router, shared expert and residual take x as it is */
    const int32_t *placement; /* as in epmoe_ep_config_t, with one rank too. The weights that a rank gets or loads are
                                 then those of its physical experts, copies included */
    int32_t num_physical;     /* as in epmoe_ep_config_t */
    epmoe_transport_t transport; /* read by epmoe_layer_memory alone, as in epmoe_ep_config_t */
    int32_t comm_sms;            /* as in epmoe_ep_config_t; may differ per rank. Products take all multiprocessors */
} epmoe_layer_config_t;
#define EPMOE_LAYER_CONFIG_INIT EPMOE_STRUCT_INIT(epmoe_layer_config_t)

/* Shapes of public models; dtype and max_tokens are left 0. INVALID_ARGUMENT names the known ones. */
EPMOE_API epmoe_status_t epmoe_preset_config(const char *name, epmoe_layer_config_t *config);
/* The i-th preset's name, NULL past the last. */
EPMOE_API const char *epmoe_preset_name(int32_t i);

/* --------------------------------------------------------------------------------------------------- checkpoint */

typedef struct epmoe_checkpoint epmoe_checkpoint_t;

typedef struct epmoe_checkpoint_info_t {
    size_t struct_size;
    char family[32]; /* config.json's model_type */
    int32_t num_layers;
    int32_t hidden;
    int32_t num_experts; /* of the MoE layers */
    int32_t num_shards;
    int64_t total_bytes; /* of tensor data */
} epmoe_checkpoint_info_t;
#define EPMOE_CHECKPOINT_INFO_INIT EPMOE_STRUCT_INIT(epmoe_checkpoint_info_t)

/* Opens a folder with config.json and model.safetensors, or shards with model.safetensors.index.json. Headers, shapes,
 * offsets, names and sizes of everything are validated here, before any compute; data is mapped when it is used.
 * Errors: IO (missing or unreadable file), FORMAT (naming file and tensor), NOT_SUPPORTED (unknown family: the message
 * says what was found and which table takes a new row). */
EPMOE_API epmoe_status_t epmoe_checkpoint_open(const char *dir, epmoe_checkpoint_t **checkpoint);
EPMOE_API void epmoe_checkpoint_close(epmoe_checkpoint_t *checkpoint); /* NULL is legal */
EPMOE_API epmoe_status_t epmoe_checkpoint_get_info(const epmoe_checkpoint_t *checkpoint, epmoe_checkpoint_info_t *info);
/* The config of the MoE block (or dense MLP) of layer `layer`, read from its tensors and config.json.
 * INVALID_ARGUMENT for a layer that the checkpoint does not have, NOT_SUPPORTED for one whose weights are in a format
 * that this version cannot run. */
EPMOE_API epmoe_status_t epmoe_checkpoint_layer_config(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                                       epmoe_layer_config_t *config);

/* -------------------------------------------------------------------------------------------------------- layer */

typedef struct epmoe_layer epmoe_layer_t;

/* Makes a layer on a communicator (NULL = one rank of its own). Collective; allocates everything forward needs.
 * Configs must agree on all ranks but for max_tokens, capacity and comm_sms. `comm` must outlive the layer. The backend
 * is the communicator's. On failure *layer is NULL on every rank, and every rank gets an error. */
EPMOE_API epmoe_status_t epmoe_layer_create(const epmoe_layer_config_t *config, epmoe_comm_t *comm,
                                            epmoe_layer_t **layer);
EPMOE_API void epmoe_layer_destroy(epmoe_layer_t *layer); /* local; NULL is legal */

/* What a layer takes on one rank, before anything is made. */
typedef struct epmoe_layer_memory_t {
    size_t struct_size;
    int32_t first_expert;  /* of this rank; with a placement its first physical expert */
    int32_t local_experts; /* experts of this rank; with a placement physical ones */
    int64_t weight_bytes;
    int64_t workspace_bytes;
    int64_t comm_bytes; /* epmoe_ep_buffer_size over config.transport, for capacity or the worst case; one rank: 0 */
} epmoe_layer_memory_t;
#define EPMOE_LAYER_MEMORY_INIT EPMOE_STRUCT_INIT(epmoe_layer_memory_t)
/* Assumes that every rank has the same max_tokens, and weights in weight_format (NONE: that of dtype) without a g_idx.
 * weight_bytes are those of weights that the layer owns, as it has them, a shared expert among the routed ones included
 * where it goes through their launches; of borrowed matrices (epmoe_layer_set_weights) it takes less. workspace_bytes
 * are the most that the layer comes to have, with weights of its own or borrowed. Local. INVALID_ARGUMENT as
 * epmoe_layer_create and, with several ranks, epmoe_ep_buffer_size. */
EPMOE_API epmoe_status_t epmoe_layer_memory(const epmoe_layer_config_t *config, int32_t size, int32_t rank,
                                            epmoe_layer_memory_t *memory);

/* This rank's weights. Experts are the local ones only (epmoe_expert_range): leading dimension local_experts. With a
 * placement they are this rank's physical experts, each with the weights of its expert. */
typedef struct epmoe_layer_weights_t {
    size_t struct_size;
    epmoe_dtype_t router_dtype;    /* of router and shared_gate: F32, BF16, F16. On CUDA config.dtype, or BF16 with
                                      config.dtype F16, which is exact in [2^-17, 65504] and else rounded; NOT_SUPPORTED
                                      otherwise, since rounding could choose other experts */
    const void *router;            /* [E,d] */
    const float *router_bias;      /* [E], with router_has_bias */
    const float *selection_bias;   /* [E], with has_selection_bias */
    epmoe_layout_t layout;         /* of gate_up, its bias and shared_gate_up */
    epmoe_weight_t gate_up;        /* [El,2f,d] */
    epmoe_weight_t down;           /* [El,d,f] */
    const float *gate_up_bias;     /* [El,2f], with expert_has_bias */
    const float *down_bias;        /* [El,d], with expert_has_bias */
    epmoe_weight_t shared_gate_up; /* [2fs,d], with shared_intermediate */
    epmoe_weight_t shared_down;    /* [d,fs] */
    const void *shared_gate;       /* [d], with shared_gated */
} epmoe_layer_weights_t;
#define EPMOE_LAYER_WEIGHTS_INIT EPMOE_STRUCT_INIT(epmoe_layer_weights_t)

/* Copies the weights into the layer's own layout (the caller may free his): GPTQ, AWQ and CT_W4 become W4. With layout
 * PACKED it borrows gate_up, down, shared_gate_up and shared_down until destroy: quantised ones must then be FP8_BLOCK,
 * MXFP4 or W4. Quantised weights that fit no packed layout are kept as fp32, on CUDA in dtype, two to eight times as
 * large, with a warning that says which and why: up rows of FP8_BLOCK that begin inside a block or are interleaved,
 * groups of unequal width in a g_idx, on CUDA also what epmoe_weight_t says that products do not take, and gate and up
 * rows with different orders of columns. On CUDA quantised weights that are copied lie in host memory (NOT_SUPPORTED
 * otherwise). Local, not collective. May be called again to replace them; after a failure past the checks
 * (no memory, a CUDA error) the layer has no weights. */
EPMOE_API epmoe_status_t epmoe_layer_set_weights(epmoe_layer_t *layer, const epmoe_layer_weights_t *weights);
/* Bell-shaped random weights with variance 1/K, a function of (seed, expert, element) alone: independent of the rank
 * count and of the backend. Local. */
EPMOE_API epmoe_status_t epmoe_layer_set_random_weights(epmoe_layer_t *layer, uint64_t seed);

typedef struct epmoe_load_options_t {
    size_t struct_size;
    /* Called after every expert with bytes done and to do; a non-zero return cancels (BAD_STATE). May be NULL. */
    int32_t (*progress)(void *ctx, int64_t done_bytes, int64_t total_bytes);
    void *progress_ctx;
    /* Tensor parallelism beside the layer's expert parallelism: this layer takes part tp_rank of tp_size equal parts of
     * the intermediate width of every expert and of the shared expert: of gate's rows, of up's rows (each of them by
     * itself, however the two are stored together) and of down's columns. Its config's intermediate and
     * shared_intermediate are those of the checkpoint divided by tp_size. The caller adds the y of the tp_size layers;
     * what must be in that sum once, the residual, only one of them gets, and of the down biases rank 0 alone has them.
     * tp_size 0 = 1: everything. The same on all ranks of the layer's communicator. A width that tp_size does not
     * divide, or tp_rank outside 0..tp_size-1: INVALID_ARGUMENT; groups of scales of a quantised down that any of the
     * parts would cut: NOT_SUPPORTED, for each of them. */
    int32_t tp_rank;
    int32_t tp_size;
} epmoe_load_options_t;
#define EPMOE_LOAD_OPTIONS_INIT EPMOE_STRUCT_INIT(epmoe_load_options_t)
/* Loads layer `layer_index` of a checkpoint: this rank's experts, the router and the shared expert; nothing else is
 * read. options NULL = none. Collective: all ranks succeed or all fail. Ranks may take different times, however long:
 * each shows the others while it loads that it is alive, and TIMEOUT means that one expert, the shared weights or a
 * call of progress took a rank most of timeout_s. MISMATCH when the layer's config is not the checkpoint's;
 * NOT_SUPPORTED for a weight format that this version cannot run. Weights are packed as epmoe_layer_set_weights packs
 * them. After a failure the layer has no weights. */
EPMOE_API epmoe_status_t epmoe_layer_load_checkpoint(epmoe_layer_t *layer, const epmoe_checkpoint_t *checkpoint,
                                                     int32_t layer_index, const epmoe_load_options_t *options);

typedef enum epmoe_stage_t {
    EPMOE_STAGE_ROUTER = 0,
    EPMOE_STAGE_ALIGN = 1,
    EPMOE_STAGE_DISPATCH = 2,
    EPMOE_STAGE_GEMM1 = 3,
    EPMOE_STAGE_ACT = 4, /* 0 where it is fused into GEMM 1 */
    EPMOE_STAGE_GEMM2 = 5,
    EPMOE_STAGE_COMBINE = 6,   /* weighted sum, way home, residual */
    EPMOE_STAGE_SHARED = 7,    /* 0 where the shared expert goes with the routed ones, in GEMM1 to COMBINE */
    EPMOE_STAGE_ATTENTION = 8, /* of a decoder layer: all in front of the MLP, both norms included */
    EPMOE_STAGE_COUNT = 9
} epmoe_stage_t;
EPMOE_API const char *epmoe_stage_string(epmoe_stage_t stage);

typedef struct epmoe_forward_args_t {
    size_t struct_size;
    int32_t num_tokens;            /* T <= max_tokens; ranks may differ */
    int32_t max_rank_tokens;       /* see epmoe_dispatch_args_t; 0 = no promise */
    const void *x;                 /* [T,d] of dtype */
    void *y;                       /* out [T,d] of dtype; may alias x or residual */
    const void *residual;          /* [T,d] of dtype or NULL: added to y before rounding */
    const int32_t *num_tokens_dev; /* optional: the actual T, at most num_tokens (host memory on the CPU); NOT_SUPPORTED
                                      on CUDA with several ranks over MPI and NCCL */
    const float *logits;           /* optional [T,E] f32: replaces the router's logits after they were computed */
    float *logits_out;             /* optional [T,E] f32: the router's own logits */
    int32_t *ids_out;              /* optional [T,k] */
    float *weights_out;            /* optional [T,k] */
    double *stage_us;              /* optional host [EPMOE_STAGE_COUNT]: time of each stage; CPU backend only */
    void *const *stage_events; /* optional host [EPMOE_STAGE_COUNT + 1] cudaEvent_t (entries may be NULL), CUDA only:
                                  entry s is recorded where stage s ends, the last entry where forward begins; also
                                  inside a captured graph */
    int64_t *expert_load;      /* optional [E]: the number of slots of this rank's tokens that chose each expert is
                                  added; see epmoe_dispatch_args_t */
} epmoe_forward_args_t;
#define EPMOE_FORWARD_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_forward_args_t)

/* One pass: logits = x router^T (fp32, never rounded) -> top-k -> dispatch -> experts -> combine + shared expert +
 * residual. Collective over the communicator's ranks, but for a dense MLP, which communicates nothing.
 * CPU backend: the work is done, and peers have been waited for (at most timeout_s), when it returns.
 * Errors of one rank (bad arguments) reach all ranks as ERROR_PEER and leave the layer usable (but over P2P as
 * epmoe_dispatch says). Outputs are written only on success. BAD_STATE before weights were set. */
EPMOE_API epmoe_status_t epmoe_layer_forward_args(epmoe_layer_t *layer, const epmoe_forward_args_t *args,
                                                  epmoe_stream_t stream);
/* The same with x, y and T alone. */
EPMOE_API epmoe_status_t epmoe_layer_forward(epmoe_layer_t *layer, const void *x, void *y, int32_t num_tokens,
                                             epmoe_stream_t stream);

/* ------------------------------------------------------------------------------------------------ decoder layer */

/* A pre-norm decoder layer around a MoE block or dense MLP, over a paged KV cache:
 *     h    = x + attention(rms_norm(x))
 *     y    = h + mlp(rms_norm(h))
 * Every rank runs the attention of its own tokens with its own copy of the weights; the MLP is an epmoe_layer_t, whose
 * experts are spread over the ranks. On CUDA it computes in bf16 and fp16 (matrices take the dtype of the MLP) with the
 * hidden size, the heads together and MLA's widths but rope_dim multiples of 8: NOT_SUPPORTED otherwise. */

typedef enum epmoe_attention_kind_t {
    EPMOE_ATTENTION_GQA = 0, /* heads of one width; H / Hk query heads share a key and a value head (Ainslie et al.
                                2023) */
    EPMOE_ATTENTION_MLA = 1, /* all heads' keys and values come from one latent per token, which is what the cache
                                holds; q is brought to the latent instead (DeepSeek-AI 2024, DeepSeek-V2) */
} epmoe_attention_kind_t;

/* How q and k heads are normalised, before they rotate. */
typedef enum epmoe_qk_norm_t {
    EPMOE_QK_NORM_NONE = 0,
    EPMOE_QK_NORM_HEAD = 1,            /* each head over its own D columns; one weight [D] for q and one for k */
    EPMOE_QK_NORM_ALL_HEADS = 2,       /* q over all its columns [H*D], k over [Hk*D] (OLMoE) */
    EPMOE_QK_NORM_HEAD_UNWEIGHTED = 3, /* each head, without a weight (Llama 4, which rotates first: the same when a
                                          whole head rotates, since that keeps its length) */
} epmoe_qk_norm_t;

/* The attention of a decoder layer and its norms; hidden, dtype and max_tokens are those of the MLP's config. */
typedef struct epmoe_decoder_config_t {
    size_t struct_size;
    epmoe_attention_kind_t attention;
    int32_t num_heads;    /* H */
    int32_t num_kv_heads; /* GQA: Hk, a divisor of H; 0 = H */
    int32_t head_dim;     /* GQA: D of q, k and v */
    int32_t q_latent;     /* MLA: width of q's latent; 0 = q is one projection */
    int32_t kv_latent;    /* MLA: width of the latent of keys and values */
    int32_t nope_dim;     /* MLA: columns of a q and k head that carry no position, */
    int32_t rope_dim;     /* and those that do, the same for all heads of k */
    int32_t value_dim;    /* MLA: columns of a v head */
    int32_t in_bias;  /* 1: the projections that read the hidden state have a bias (MLA without q_latent: not q's) */
    int32_t out_bias; /* 1: so does the last one */
    epmoe_qk_norm_t qk_norm; /* GQA */
    int32_t has_sinks;       /* 1: see epmoe_attention_args_t */
    int32_t window;          /* 0 = none */
    float scale;             /* of q . k; 0 = D^-0.5, MLA (nope_dim + rope_dim)^-0.5 */
    float norm_eps;          /* of both norms and qk_norm; 0 = 1e-6 */
    float latent_eps;        /* MLA: of the latents' norms; 0 = 1e-6 */
    epmoe_rope_style_t rope_style;
    epmoe_rope_table_args_t rope; /* num_positions bounds the sequences' lengths; rotary_dim 0 = D or rope_dim. cos_sin
                                     NULL: the layer makes its table; otherwise a filled one in the backend's memory,
                                     borrowed until destroy, which layers may share. struct_size may be 0. */
    /* The cache: values as wide as keys, or with MLA none (keys of kv_latent + rope_dim columns, one head). */
    epmoe_cache_layout_t cache_layout;
    int32_t key_pack;          /* x of V1 */
    epmoe_dtype_t cache_dtype; /* 0 = dtype, or F8_E4M3 */
    int32_t block_size;        /* S; 0 = 16 */
    int32_t num_blocks;        /* of a cache that the layer owns, zeroed at first; 0 = the caller has one */
    int32_t max_seqs;          /* most sequences in a forward; 0 = max_tokens */
    int32_t no_rope;           /* GQA, 1: q and k do not rotate; rope.num_positions still bounds the lengths */
} epmoe_decoder_config_t;
#define EPMOE_DECODER_CONFIG_INIT EPMOE_STRUCT_INIT(epmoe_decoder_config_t)

/* The attention of layer `layer`, as config.json has it; the cache is NHD in the dtype of the layer, and the caller's.
 * NOT_SUPPORTED, naming key and value, for a variant that this version does not know. */
EPMOE_API epmoe_status_t epmoe_checkpoint_decoder_config(const epmoe_checkpoint_t *checkpoint, int32_t layer,
                                                         epmoe_decoder_config_t *config);

/* The attention of a preset (epmoe_preset_name): of gpt-oss that of the layers without a window, of Llama 4 that of
 * those which rotate, up to the 8192 tokens that they attend to. rope.num_positions is the model's own bound, up to
 * which a layer makes its table: lower it where contexts are shorter. The cache is NHD, and the caller's. */
EPMOE_API epmoe_status_t epmoe_preset_decoder_config(const char *name, epmoe_decoder_config_t *config);

/* Bytes of one block of the key cache, and of the value cache (0 with MLA). dtype: of the layer; 0 = BF16. */
EPMOE_API epmoe_status_t epmoe_decoder_block_bytes(const epmoe_decoder_config_t *config, epmoe_dtype_t dtype,
                                                   int64_t *key_bytes, int64_t *value_bytes);

typedef struct epmoe_decoder epmoe_decoder_t;

/* Makes a layer on a communicator (NULL = one rank of its own). Collective as epmoe_layer_create is; allocates
 * everything forward needs. Both configs must agree on all ranks, but for max_tokens, capacity, max_seqs and
 * num_blocks. On failure *decoder is NULL on every rank. */
EPMOE_API epmoe_status_t epmoe_decoder_create(const epmoe_decoder_config_t *config, const epmoe_layer_config_t *mlp,
                                              epmoe_comm_t *comm, epmoe_decoder_t **decoder);
EPMOE_API void epmoe_decoder_destroy(epmoe_decoder_t *decoder); /* local; NULL is legal */

/* Loads layer `layer_index` of a checkpoint: norms, attention, and the MLP as epmoe_layer_load_checkpoint does, with
 * its rules; the norms and attention count as one step, and not in progress. MISMATCH when a config is not the
 * checkpoint's. NOT_SUPPORTED for options.tp_size above 1: attention is not split. */
EPMOE_API epmoe_status_t epmoe_decoder_load_checkpoint(epmoe_decoder_t *decoder, const epmoe_checkpoint_t *checkpoint,
                                                       int32_t layer_index, const epmoe_load_options_t *options);

/* Random norms and attention as a function of (seed, element) alone, and those of epmoe_layer_set_random_weights:
 * matrices of variance 1/K in the dtype of the MLP, norms around 1. Local. After a failure the layer has no weights. */
EPMOE_API epmoe_status_t epmoe_decoder_set_random_weights(epmoe_decoder_t *decoder, uint64_t seed);

/* New tokens of B sequences: all of a prompt, the next of each, or any mix. As in epmoe_attention_args_t, rows
 * query_start[b] .. query_start[b+1]-1 are the last tokens of sequence b, whose length seq_lens[b] counts them; their
 * positions and cache slots follow from seq_lens and block_table. A sequence of length 0 is padding: its rows go
 * through the layer without being cached. On CUDA all arrays are device memory, so that a captured forward serves every
 * step of as many tokens and sequences: the device reads lengths and tables anew. */
typedef struct epmoe_decoder_forward_args_t {
    size_t struct_size;
    int32_t num_tokens;         /* T <= max_tokens, may be 0; ranks may differ */
    int32_t num_seqs;           /* B <= max_seqs */
    const void *x;              /* [T,d] of dtype */
    void *y;                    /* out [T,d] of dtype; may alias x */
    const int32_t *query_start; /* [B+1], from 0 to T */
    const int32_t *seq_lens;    /* [B] */
    const int32_t *block_table; /* [B,M] */
    int32_t max_blocks;         /* M */
    int32_t num_blocks;         /* blocks of the caller's cache; with an own cache not read, nor are these two: */
    void *key_cache;
    void *value_cache;    /* not read with MLA */
    const float *k_scale; /* [1] or NULL = 1; with an F8_E4M3 cache alone */
    const float *v_scale;
    float *logits_out;  /* optional, as in epmoe_forward_args_t, and not written with a dense MLP: [T,E], */
    int32_t *ids_out;   /* [T,k], */
    float *weights_out; /* [T,k] */
    /* As in epmoe_forward_args_t: */
    const float *logits; /* not read with a dense MLP */
    double *stage_us;
    void *const *stage_events;
    int32_t max_rank_tokens;
    int64_t *expert_load; /* not read with a dense MLP */
} epmoe_decoder_forward_args_t;
#define EPMOE_DECODER_FORWARD_ARGS_INIT EPMOE_STRUCT_INIT(epmoe_decoder_forward_args_t)

/* One pass; writes the new tokens' keys and values to the cache. Collective as epmoe_layer_forward_args is, with its
 * rules for errors: one of this rank's arguments reaches the others as ERROR_PEER and leaves y and the cache as they
 * were; after a peer's error the cache may hold this rank's new tokens, y is not written.
 * Errors of the arguments: INVALID_ARGUMENT for sizes out of range, NULL pointers, query_start that does not ascend
 * from 0 to T, a sequence with more queries than tokens, longer than the table of positions or than M * S, a block
 * outside the cache; of these, on CUDA only sizes and pointers are looked at, and what the cache or the table of
 * positions does not have is skipped and reported as a bad id by a later call. BAD_STATE before weights were loaded. */
EPMOE_API epmoe_status_t epmoe_decoder_forward(epmoe_decoder_t *decoder, const epmoe_decoder_forward_args_t *args,
                                               epmoe_stream_t stream);

/* What follows the last decoder layer: logits = rms_norm(x) w^T, fp32. On CUDA x is bf16 or fp16, and so is w. */
typedef struct epmoe_head epmoe_head_t;

typedef struct epmoe_head_config_t {
    size_t struct_size;
    int32_t hidden;      /* d */
    int32_t vocab_size;  /* V */
    float norm_eps;      /* 0 = 1e-6 */
    epmoe_dtype_t dtype; /* of x; 0 = BF16 */
    int32_t max_tokens;  /* 0 = 4096 */
    epmoe_backend_t backend;
} epmoe_head_config_t;
#define EPMOE_HEAD_CONFIG_INIT EPMOE_STRUCT_INIT(epmoe_head_config_t)

EPMOE_API epmoe_status_t epmoe_checkpoint_head_config(const epmoe_checkpoint_t *checkpoint,
                                                      epmoe_head_config_t *config);
/* Allocates all that forward needs. INVALID_ARGUMENT for sizes out of range; NOT_SUPPORTED on CUDA for fp32 and for a
 * hidden size that is no multiple of 8. *head is NULL then. */
EPMOE_API epmoe_status_t epmoe_head_create(const epmoe_head_config_t *config, epmoe_head_t **head);
EPMOE_API void epmoe_head_destroy(epmoe_head_t *head); /* NULL is legal */
/* The final norm, and lm_head or, where the model ties them, the embedding. Local. After a failure the head has no
 * weights. MISMATCH when the config is not the checkpoint's; FORMAT and NOT_SUPPORTED as epmoe_layer_load_checkpoint.
 */
EPMOE_API epmoe_status_t epmoe_head_load_checkpoint(epmoe_head_t *head, const epmoe_checkpoint_t *checkpoint);
/* x [T,d] of dtype, logits out [T,V] fp32; T = 0 is a no-op. INVALID_ARGUMENT for T outside 0..max_tokens or a NULL
 * pointer, BAD_STATE before weights were loaded. */
EPMOE_API epmoe_status_t epmoe_head_forward(epmoe_head_t *head, const void *x, float *logits, int32_t num_tokens,
                                            epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* EPMOE_EPMOE_H */
