/* The epilogue of the wgmma grouped GEMM: accumulators of 64 weight rows by up to 256 tokens, held by one warpgroup, to
 * rows of y. Gated, every 16 weight rows are 8 gate rows and then their 8 up rows, so that a thread holds both halves
 * of an output: d[4j], d[4j+1] the gates of two tokens, d[4j+2], d[4j+3] their ups.
 *
 * Two ways. The fast one finishes the outputs in registers and turns them by stmatrix so that a token's outputs lie
 * side by side in shared memory, from where a warp of its own, the storer of the warpgroup, takes them to y while the
 * warpgroup finishes the next ones or is in the next product. The other one parks fp32 accumulators in shared memory
 * and finishes them one by one in a loop: any type, any width, any activation, little code. */
#ifndef EPMOEI_GROUPED_GEMM_EPILOGUE_SM90_CUH
#define EPMOEI_GROUPED_GEMM_EPILOGUE_SM90_CUH

#include "kernels/grouped_gemm_cuda.cuh"
#include "kernels/parts_cuda.cuh"
#include "kernels/ptx.cuh"

namespace
{

constexpr int kWarpgroup = 128;
constexpr int kStagingParts = 2;
constexpr int kStagingPartBytes = 4096;
constexpr int kStagingBytes = kStagingParts * kStagingPartBytes; /* of a warpgroup */

/* Place in a ring of stages: the parity of a phase flips with every round. */
struct ring_t {
    int32_t stage;
    uint32_t parity;
    __device__ __forceinline__ void advance(int32_t stages)
    {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity)
{
    while (!ptx_mbarrier_try_wait(barrier, parity)) {
    }
}

/* The parts of a warpgroup's staging go from it to its storer and back. */
struct staging_barriers_t {
    uint64_t full[kStagingParts];
    uint64_t empty[kStagingParts];
};

/* A tile as its consumers see it. */
struct epilogue_t {
    char *staging; /* [kStagingBytes], this warpgroup's */
    staging_barriers_t *barriers;
    const int32_t *rows;  /* [max_n] row of y, or -1 */
    const float2 *scales; /* [max_n] what multiplies the token's products, and its outputs */
    int32_t num_rows;
    int32_t expert;
    int32_t col;   /* first output of this warpgroup */
    int32_t group; /* warpgroup of consumers: below 4 */
    bool gated;    /* set for outputs that are given away later */
    int32_t tid;   /* in the warpgroup */
    float bias[2]; /* gated: gate and up; plain: of weight row lane/4 of this warp's 16 and of the one 8 below */
};

/* What silu, swiglu_oai and gelu_tanh have in common, after the clamp: gate * sigmoid(gate * (linear + cubic * gate^2))
 * * (up + shift). Without branches, so that the outputs of a thread overlap. */
struct sigmoid_family_t {
    float linear; /* both times -log2(e), for exp2 */
    float cubic;
    float shift;
    float limit; /* +inf = none */
};

__device__ __forceinline__ sigmoid_family_t sigmoid_family(const gemm_params_t &p)
{
    const float minus_log2e = -1.44269504f;
    sigmoid_family_t f = {minus_log2e, 0.0f, 0.0f, p.limit > 0.0f ? p.limit : INFINITY};
    if (p.activation == EPMOE_ACTIVATION_SWIGLU_OAI) f.linear = p.alpha * minus_log2e, f.shift = 1.0f;
    if (p.activation == EPMOE_ACTIVATION_GELU_TANH) f.linear = 1.5957691f * minus_log2e, f.cubic = f.linear * 0.044715f;
    return f;
}

__device__ __forceinline__ float sigmoid_gate(const sigmoid_family_t &f, float gate, float up)
{
    gate = ptx_min_nan(gate, f.limit);
    up = ptx_max_nan(ptx_min_nan(up, f.limit), -f.limit);
    const float square = fminf(gate * gate, 3.4028235e38f); /* 0 * inf would make a NaN */
    const float fraction = ptx_reciprocal(1.0f + ptx_exp2(gate * (f.linear + f.cubic * square)));
    return epmoei_gate_device(gate, fraction) * (up + f.shift);
}

/* silu(gate) * up. Below the bound the fraction is 0 whatever the gate, which at -inf would make a NaN of it. */
__device__ __forceinline__ float plain_silu(float gate, float up)
{
    gate = ptx_max_nan(gate, -1e30f);
    return gate * ptx_reciprocal(1.0f + ptx_exp2(gate * -1.44269504f)) * up;
}

/* Barrier numbers are immediates: one in a register would reserve all sixteen. */
__device__ __forceinline__ void warpgroup_barrier(int32_t group)
{
    switch (group) {
    case 0: ptx_named_barrier<2>(kWarpgroup); break;
    case 1: ptx_named_barrier<3>(kWarpgroup); break;
    case 2: ptx_named_barrier<4>(kWarpgroup); break;
    default: ptx_named_barrier<5>(kWarpgroup);
    }
}

template <typename T> __device__ __forceinline__ uint32_t pack_pair(float a, float b, T)
{
    return epmoei_pack_pair(a, b, T());
}

/* Tokens of a part: their outputs are 64 bytes each when gated, else 128. */
template <int kChunks> constexpr int kPartRows = kStagingPartBytes / (16 * kChunks);

/* Where chunk `chunk` of 16 bytes of a part's token lies: so that neither stmatrix nor the storer meets a bank twice.
 */
template <int kChunks> __device__ __forceinline__ int staged_offset(int token, int chunk)
{
    return token * kChunks * 16 + ((chunk ^ (kChunks == 8 ? token & 7 : token >> 1 & 3)) << 4);
}

/* One warp: a tile's outputs, part by part, to y. All of kInFlight loads are under way before the first store, and a
 * store is a predicate, not a branch: consumers wait for this warp. */
template <int kChunks, int kInFlight>
__device__ __forceinline__ void store_parts(const gemm_params_t &p, const epilogue_t &e, ring_t &parts)
{
    constexpr int kPerRound = 32 / kChunks, kRounds = kPartRows<kChunks> / kPerRound;
    const int lane = threadIdx.x % 32, chunk = lane % kChunks, own = lane / kChunks, col = e.col + chunk * 8;
    const int num_rows = col < p.n_out ? e.num_rows : 0;
    const int64_t pitch = (int64_t)p.n_out * 2;
    char *const y = (char *)p.y + col * 2;
    for (int first = 0; first < e.num_rows; first += kPartRows<kChunks>, parts.advance(kStagingParts)) {
        const char *from = e.staging + parts.stage * kStagingPartBytes;
        const int32_t *rows_from = e.rows + first + own;
        wait_barrier(ptx_shared_address(&e.barriers->full[parts.stage]), parts.parity);
#pragma unroll 1
        for (int i = 0; i < kRounds; i += kInFlight) {
            int32_t rows[kInFlight];
            uint4 held[kInFlight];
#pragma unroll
            for (int j = 0; j < kInFlight; j++) {
                rows[j] = rows_from[(i + j) * kPerRound]; /* past the tile's: any value */
                held[j] = *(const uint4 *)(from + staged_offset<kChunks>(own + (i + j) * kPerRound, chunk));
            }
#pragma unroll
            for (int j = 0; j < kInFlight; j++)
                ptx_store_16_if(y + rows[j] * pitch, held[j],
                                rows[j] >= 0 && first + own + (i + j) * kPerRound < num_rows);
        }
        ptx_mbarrier_arrive(ptx_shared_address(&e.barriers->empty[parts.stage]));
    }
}

/* The accumulators of 32 tokens plus the bias of their row. Registers cannot be indexed, and unrolled the epilogue
 * would be more code than the instruction cache holds: a part of it costs more to fetch than to run. So this is all
 * there is of each part. */
constexpr int kSelectTokens = 32;
template <int kRegisters>
__device__ __forceinline__ void select_part(float (&part)[16], const float (&acc)[kRegisters], int index,
                                            const float (&bias)[2])
{
    switch (index) {
#define PART(n)                                                                                                        \
    case n:                                                                                                            \
        if constexpr (16 * n < kRegisters) {                                                                           \
            _Pragma("unroll") for (int i = 0; i < 16; i++) part[i] = acc[16 * n + i] + bias[i / 2 % 2];                \
        }                                                                                                              \
        break
        PART(0);
        PART(1);
        PART(2);
        PART(3);
        PART(4);
        PART(5);
        PART(6);
    default: PART(7);
#undef PART
    }
}

/* Where a loop over the tokens of a tile, of which there is at least one, ends: a constant when the accumulators are of
 * one part, whose registers are then free in the only round. */
template <int kRegisters> __device__ __forceinline__ int last_token(const epilogue_t &e)
{
    return kRegisters == 16 ? 1 : e.num_rows;
}

/* 32 outputs a token. kPlainSilu: without clamp and weights. */
template <typename T, bool kPlainSilu, int kRegisters>
__device__ __forceinline__ void stage_gated(const gemm_params_t &p, const epilogue_t &e, const float (&acc)[kRegisters],
                                            ring_t &parts)
{
    const int lane = e.tid % 32, warp = e.tid / 32;
    const sigmoid_family_t family = sigmoid_family(p);
    const float no_bias[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int first = 0; first < last_token<kRegisters>(e); first += kPartRows<4>, parts.advance(kStagingParts)) {
        const uint32_t staging = ptx_shared_address(e.staging) + parts.stage * kStagingPartBytes;
        wait_barrier(ptx_shared_address(&e.barriers->empty[parts.stage]), parts.parity ^ 1);
#pragma unroll 1
        for (int token = first; token < min(first + kPartRows<4>, last_token<kRegisters>(e)); token += kSelectTokens) {
            float part[16];
            uint32_t packed[4];
            select_part(part, acc, token / kSelectTokens, kPlainSilu ? e.bias : no_bias);
#pragma unroll
            for (int b = 0; b < 4; b++) {
                const float *v = part + 4 * b;
                if constexpr (kPlainSilu) {
                    packed[b] = pack_pair(plain_silu(v[0], v[2]), plain_silu(v[1], v[3]), T());
                } else {
                    /* x and y: in and out of the first token; z and w of the second. */
                    const float4 scale = *(const float4 *)(e.scales + token + 8 * b + 2 * (lane % 4));
                    packed[b] = pack_pair(
                        scale.y * sigmoid_gate(family, v[0] * scale.x + e.bias[0], v[2] * scale.x + e.bias[1]),
                        scale.w * sigmoid_gate(family, v[1] * scale.z + e.bias[0], v[3] * scale.z + e.bias[1]), T());
                }
            }
            ptx_stmatrix_x4_trans(staging + staged_offset<4>(token - first + lane, warp), packed);
        }
        ptx_mbarrier_arrive(ptx_shared_address(&e.barriers->full[parts.stage]));
    }
}

/* 64 outputs a token. */
template <typename T, int kRegisters>
__device__ __forceinline__ void stage_plain(const gemm_params_t &p, const epilogue_t &e, const float (&acc)[kRegisters],
                                            ring_t &parts)
{
    static_assert(kPartRows<8> == kSelectTokens, "one selection fills a part");
    const int lane = e.tid % 32, warp = e.tid / 32;
#pragma unroll 1
    for (int token = 0; token < last_token<kRegisters>(e); token += kSelectTokens, parts.advance(kStagingParts)) {
        const uint32_t staging = ptx_shared_address(e.staging) + parts.stage * kStagingPartBytes;
        float part[16];
        select_part(part, acc, token / kSelectTokens, e.bias);
        uint32_t packed[2][4];
#pragma unroll
        for (int block = 0; block < 4; block++) {
            /* y and w: the weights of two tokens. */
            const float4 scale = *(const float4 *)(e.scales + token + 8 * block + 2 * (lane % 4));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *v = part + 4 * block + 2 * half;
                packed[block / 2][block % 2 * 2 + half] = pack_pair(v[0] * scale.y, v[1] * scale.w, T());
            }
        }
        wait_barrier(ptx_shared_address(&e.barriers->empty[parts.stage]), parts.parity ^ 1);
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
            ptx_stmatrix_x4_trans(staging +
                                      staged_offset<8>(16 * pair + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2),
                                  packed[pair]);
        ptx_mbarrier_arrive(ptx_shared_address(&e.barriers->full[parts.stage]));
    }
}

/* 32 tokens at a time, as fp32. */
template <int kRegisters>
__device__ __forceinline__ void store_any(const gemm_params_t &p, const epilogue_t &e, const float (&acc)[kRegisters])
{
    constexpr int kTokens = kSelectTokens, kStep = 4;
    const int lane = e.tid % 32, warp = e.tid / 32;
    float *staging = (float *)e.staging; /* [kTokens][64], blocks of 8 swizzled by the token */
    const float *bias = p.bias ? p.bias + (int64_t)e.expert * p.n : nullptr;
    const float no_bias[2] = {0.0f, 0.0f}; /* gemm_finish adds it */
    const int cols = p.gated ? 32 : 64;
#pragma unroll 1
    for (int chunk = 0; chunk * kTokens < last_token<kRegisters>(e); chunk++) {
        float part[16];
        select_part(part, acc, chunk, no_bias);
        warpgroup_barrier(e.group);
#pragma unroll
        for (int b = 0; b < kTokens / 8; b++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int token = b * 8 + 2 * (lane % 4) + r % 2, row = warp * 16 + lane / 4 + r / 2 * 8;
                staging[token * 64 + (row ^ (token / 2 % 4 * 8))] = part[4 * b + r];
            }
        warpgroup_barrier(e.group);
        const int count = min(kTokens, e.num_rows - chunk * kTokens) * (cols / kStep);
#pragma unroll 1
        for (int i = e.tid; i < count; i += kWarpgroup) {
            const int token = i / (cols / kStep), local = i % (cols / kStep) * kStep, col = e.col + local;
            const int32_t row = e.rows[chunk * kTokens + token];
            if (row < 0 || col >= p.n_out) continue;
            const int gate = p.gated ? local / 8 * 16 + local % 8 : local, swizzle = token / 2 % 4 * 8;
            const float *from = staging + token * 64;
            const float2 scale = e.scales[chunk * kTokens + token];
            gemm_store_run<kStep>(p, (int64_t)row * p.n_out + col, p.n_out - col, [&](int j) {
                const float a = from[(gate + j) ^ swizzle], b = p.gated ? from[(gate + 8 + j) ^ swizzle] : 0.0f;
                return gemm_finish(p, bias, scale.x * scale.y, p.gated ? 2 * (col + j) : col + j, a, b);
            });
        }
    }
}

/* The biases of the two weight rows of this thread, before the product so that it hides the wait. */
__device__ __forceinline__ void load_bias(const gemm_params_t &p, epilogue_t &e)
{
    const int lane = e.tid % 32, warp = e.tid / 32;
    e.bias[0] = e.bias[1] = 0.0f;
    if (!p.bias) return;
    const float *bias = p.bias + (int64_t)e.expert * p.n;
    const int32_t col = e.col + (p.gated ? warp * 8 : warp * 16) + lane / 4;
    const int32_t rows[2] = {p.gated ? gemm_weight_row(p, 2 * col) : col,
                             p.gated ? gemm_weight_row(p, 2 * col + 1) : col + 8};
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (p.gated ? col < p.n_out : rows[i] < p.n) e.bias[i] = bias[rows[i]];
}

/* The way of a call's outputs. */
enum epilogue_way_t { WAY_ANY, WAY_PLAIN, WAY_GATED, WAY_PLAIN_SILU };

inline epilogue_way_t epilogue_way(const epmoe_grouped_gemm_args_t *args)
{
    const bool gated = args->activation < EPMOE_ACTIVATION_NONE;
    if (args->y_dtype != args->x_dtype || (gated ? args->n / 2 : args->n) % 8) return WAY_ANY;
    if (args->activation == EPMOE_ACTIVATION_SILU && !(args->limit > 0.0f) && !args->row_weights) return WAY_PLAIN_SILU;
    if (gated) return args->activation == EPMOE_ACTIVATION_GELU ? WAY_ANY : WAY_GATED;
    return args->activation == EPMOE_ACTIVATION_NONE && !args->weight_on_input ? WAY_PLAIN : WAY_ANY;
}

/* What a tile's warpgroup does with its accumulators. */
template <typename T, int kRegisters>
__device__ __forceinline__ void finish_tile(const gemm_params_t &p, int32_t way, const epilogue_t &e,
                                            const float (&acc)[kRegisters], ring_t &parts)
{
    switch (way) {
    case WAY_PLAIN: stage_plain<T>(p, e, acc, parts); break;
    case WAY_GATED: stage_gated<T, false>(p, e, acc, parts); break;
    case WAY_PLAIN_SILU: stage_gated<T, true>(p, e, acc, parts); break;
    default: store_any(p, e, acc);
    }
}

} // namespace

#endif
