/* What the kernels over heads share: how threads are laid over tokens, heads and columns, positions, and the rotation.
 * A thread has two runs of kRun columns of a head, whose rotation needs no other thread; it takes the same runs of
 * several heads of one token, for which it reads its part of the token's row of the table once. */
#ifndef EPMOEI_HEADS_CUDA_CUH
#define EPMOEI_HEADS_CUDA_CUH

#include "kernels/launch_cuda.cuh"
#include "kernels/parts_cuda.cuh"

/* ------------------------------------------------------------------------------------------------ threads and heads */

/* threadIdx.x = (token * slots + slot) * lanes + lane; blockIdx.y cuts the heads too. A thread's first head is
 * blockIdx.y * slots + slot, the step to its next `slots * gridDim.y`. */
struct epmoei_head_grid_t {
    dim3 blocks;
    dim3 threads;
    int32_t lanes;  /* threads for one head */
    int32_t slots;  /* heads of a token that a block takes at once */
    int32_t tokens; /* of a block */
};

/* lanes <= 256. */
static inline epmoei_head_grid_t epmoei_head_grid(int64_t num_tokens, int64_t heads, int32_t lanes)
{
    const int64_t kThreads = 256, kThreadsPerSm = 1024, kMostHeads = 4, kMostBlocksY = 65535;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t num_sms = device ? device->num_sms : 1;
    int64_t heads_per_thread = kMostHeads;
    while (heads_per_thread > 1 && num_tokens * lanes * heads < heads_per_thread * num_sms * kThreadsPerSm)
        heads_per_thread /= 2;
    int64_t slots = epmoei_ceil_div(heads, heads_per_thread);
    const int64_t blocks_y = epmoei_min64(epmoei_ceil_div(slots * lanes, kThreads), kMostBlocksY);
    slots = epmoei_min64(epmoei_ceil_div(slots, blocks_y), kThreads / lanes);
    int64_t tokens = kThreads / (slots * lanes);
    tokens = epmoei_max64(1, epmoei_min64(tokens, num_tokens * blocks_y / num_sms));
    epmoei_head_grid_t grid;
    grid.lanes = lanes;
    grid.slots = (int32_t)slots;
    grid.tokens = (int32_t)tokens;
    grid.blocks = dim3((unsigned)epmoei_ceil_div(num_tokens, tokens), (unsigned)blocks_y);
    grid.threads = dim3((unsigned)epmoei_round_up(tokens * slots * lanes, 32));
    return grid;
}

/* A thread's place. */
struct epmoei_head_place_t {
    int32_t lane;
    int32_t head;
    int64_t token;
    bool live; /* false in what fills the last warp and the last block */
};

__device__ __forceinline__ epmoei_head_place_t epmoei_head_place(int32_t lanes, int32_t slots, int32_t tokens,
                                                                 int32_t num_tokens)
{
    const uint32_t above = threadIdx.x / (uint32_t)lanes, token = above / (uint32_t)slots;
    epmoei_head_place_t place;
    place.lane = (int32_t)(threadIdx.x - above * (uint32_t)lanes);
    place.head = (int32_t)(blockIdx.y * (uint32_t)slots + above - token * (uint32_t)slots);
    place.token = (int64_t)blockIdx.x * tokens + token;
    place.live = token < (uint32_t)tokens && place.token < num_tokens;
    return place;
}

/* ------------------------------------------------------------------------------------------------- walks over heads
 *
 * Kernels bound by memory have as many blocks as the SMs hold at once. Each walks over units, `tokens` tokens times
 * `slots` heads, in steps of the grid, and threadIdx.x = (token * slots + slot) * lanes + lane as above. The two runs
 * of a thread come through a ring in shared memory that is its own: copies of later units are under way while it
 * computes, without registers and without barriers. */
static const uint32_t kHeadStages = 4;     /* one is read while the others arrive */
static const int kHeadWalkThreads = 288;   /* of a block at most */
static const int kHeadWalkHeads = 1 << 29; /* of a token at most */
static const int kHeadWalkBlocks = 3;      /* of an SM, of blocks of so many threads: 110 KB of rings */

/* What a kernel knows of its walk. */
struct epmoei_head_steps_t {
    int32_t lanes;
    int32_t slots;
    int32_t tokens;
    int32_t heads;       /* of all units of a token, at least as many as there are */
    int32_t step_tokens; /* of a step, or `tokens` more where it passes the last unit of its tokens, */
    int32_t step_heads;  /* and heads, less `heads` there */
};

struct epmoei_head_walk_grid_t {
    dim3 blocks;
    dim3 threads;
    size_t shared_bytes;
    epmoei_head_steps_t steps;
};

/* lanes <= kHeadWalkThreads, heads <= kHeadWalkHeads. */
static inline epmoei_head_walk_grid_t epmoei_head_walk_grid(int64_t num_tokens, int64_t heads, int32_t lanes)
{
    const int64_t kFewThreads = 64, kThreadsPerSm = kHeadWalkThreads * kHeadWalkBlocks;
    const epmoei_device_info_t *device = epmoei_device_current();
    const int64_t num_sms = device ? device->num_sms : 1;
    int64_t groups = epmoei_ceil_div(heads, kHeadWalkThreads / lanes), slots = epmoei_ceil_div(heads, groups);
    while (slots > 1 && slots * lanes > kFewThreads && num_tokens * groups < num_sms) {
        slots = epmoei_ceil_div(slots, 2);
        groups = epmoei_ceil_div(heads, slots);
    }
    int64_t tokens = epmoei_max64(1, 2 * kFewThreads / (slots * lanes));
    tokens = epmoei_max64(1, epmoei_min64(tokens, num_tokens * groups / num_sms));
    const int64_t threads = epmoei_round_up(tokens * slots * lanes, 32);
    const int64_t units = epmoei_ceil_div(num_tokens, tokens) * groups;
    const int64_t blocks = epmoei_min64(units, num_sms * epmoei_max64(1, kThreadsPerSm / threads));
    epmoei_head_walk_grid_t grid;
    grid.blocks = dim3((unsigned)blocks);
    grid.threads = dim3((unsigned)threads);
    grid.shared_bytes = (size_t)(threads * kHeadStages) * 2 * sizeof(uint4);
    grid.steps.lanes = lanes;
    grid.steps.slots = (int32_t)slots;
    grid.steps.tokens = (int32_t)tokens;
    grid.steps.heads = (int32_t)(groups * slots);
    grid.steps.step_tokens = (int32_t)(blocks / groups * tokens);
    grid.steps.step_heads = (int32_t)(blocks % groups * slots);
    return grid;
}

/* A thread's place in the unit where a walk stands; all threads of a block go the same number of steps. Tokens stay
 * below 2^32, also some steps behind the end. */
struct epmoei_head_walk_t {
    uint32_t first; /* token of the unit: at or behind the last one the walk has ended */
    uint32_t token; /* of this thread */
    int32_t unit_head;
    int32_t slot;

    __device__ __forceinline__ void begin(const epmoei_head_steps_t &steps)
    {
        const uint32_t above = threadIdx.x / (uint32_t)steps.lanes, inside = above / (uint32_t)steps.slots;
        const uint32_t groups = (uint32_t)(steps.heads / steps.slots), unit = blockIdx.x / groups;
        /* What fills the last warp has no head. */
        slot = inside < (uint32_t)steps.tokens ? (int32_t)(above - inside * (uint32_t)steps.slots) : 1 << 30;
        unit_head = (int32_t)(blockIdx.x - unit * groups) * steps.slots;
        first = unit * (uint32_t)steps.tokens;
        token = first + inside;
    }
    __device__ __forceinline__ int32_t head() const { return unit_head + slot; }
    /* Whether the step passes the last unit of its tokens. */
    __device__ __forceinline__ bool step(const epmoei_head_steps_t &steps)
    {
        unit_head += steps.step_heads;
        const bool passes = unit_head >= steps.heads;
        const uint32_t on = (uint32_t)(steps.step_tokens + (passes ? steps.tokens : 0));
        unit_head -= passes ? steps.heads : 0;
        token += on;
        first += on;
        return passes;
    }
};

/* The thread's 2 * 16 bytes of each stage. */
struct epmoei_head_ring_t {
    uint32_t own;

    __device__ __forceinline__ uint32_t place(uint32_t stage) const { return own + stage * blockDim.x * 32; }
    /* One group of copies; a run that is not `valid` stays as it is. */
    __device__ __forceinline__ void copy(uint32_t stage, const void *a, bool valid_a, const void *b, bool valid_b) const
    {
        ptx_cp_async_16_if(place(stage), a, 16, valid_a);
        ptx_cp_async_16_if(place(stage) + blockDim.x * 16, b, 16, valid_b);
        ptx_cp_async_commit();
    }
    /* Of the oldest group. */
    __device__ __forceinline__ void take(uint4 &a, uint4 &b, uint32_t stage) const
    {
        uint32_t words[2][4];
        ptx_cp_async_wait<kHeadStages - 2>();
        ptx_load_shared_16(words[0], place(stage));
        ptx_load_shared_16(words[1], place(stage) + blockDim.x * 16);
        a = make_uint4(words[0][0], words[0][1], words[0][2], words[0][3]);
        b = make_uint4(words[1][0], words[1][1], words[1][2], words[1][3]);
    }
};

/* A thread of such a kernel: where it computes, where its copies are, and which runs of a head it has. */
struct epmoei_head_thread_t {
    epmoei_head_ring_t ring;
    epmoei_head_walk_t at;
    epmoei_head_walk_t ahead;
    int32_t lane;

    /* stages: the block's dynamic shared memory. */
    __device__ __forceinline__ epmoei_head_thread_t(const epmoei_head_steps_t &steps, uint4 *stages)
    {
        ring.own = ptx_shared_address(stages + threadIdx.x);
        at.begin(steps);
        ahead = at;
        lane = (int32_t)(threadIdx.x % (uint32_t)steps.lanes);
    }
};

/* ------------------------------------------------------------------------------------------ positions and the table */

struct epmoei_positions_t {
    const void *data;
    const float *cos_sin; /* [num_positions, rotary_dim] */
    int32_t *error_word;
    int32_t num_positions;
    int32_t rotary_dim;
    epmoe_dtype_t dtype;
};

/* Element i of an array of I32 or I64. */
__device__ __forceinline__ int64_t epmoei_load_index(const void *data, epmoe_dtype_t dtype, int64_t i)
{
    return dtype == EPMOE_I64 ? ((const int64_t *)data)[i] : ((const int32_t *)data)[i];
}

/* The same as it lies in memory, so that nothing waits for it yet. */
struct epmoei_raw_index_t {
    int32_t low;
    int32_t high; /* of I32: 0 */
};

__device__ __forceinline__ epmoei_raw_index_t epmoei_load_raw_index(const void *data, epmoe_dtype_t dtype, uint32_t i)
{
    const bool wide = dtype == EPMOE_I64;
    const int32_t *word = (const int32_t *)data + ((int64_t)i << wide);
    epmoei_raw_index_t raw = {word[0], 0};
    if (wide) raw.high = word[1];
    return raw;
}

/* The last token's behind the end. */
__device__ __forceinline__ epmoei_raw_index_t epmoei_load_token_index(const void *data, epmoe_dtype_t dtype,
                                                                      uint32_t token, uint32_t num_tokens)
{
    return epmoei_load_raw_index(data, dtype, min(token, num_tokens - 1));
}

__device__ __forceinline__ int64_t epmoei_index_of(const epmoei_raw_index_t &raw, epmoe_dtype_t dtype)
{
    return dtype == EPMOE_I64 ? (int64_t)((uint64_t)(uint32_t)raw.high << 32 | (uint32_t)raw.low) : raw.low;
}

/* The row of the table for a token's position; NULL outside it, which one thread of the token `counts`. */
__device__ __forceinline__ const float *epmoei_table_row(const epmoei_positions_t &positions, int64_t position,
                                                         bool counts)
{
    if (position >= 0 && position < positions.num_positions) return positions.cos_sin + position * positions.rotary_dim;
    if (counts) epmoei_count_bad(positions.error_word, 1);
    return NULL;
}
__device__ __forceinline__ const float *epmoei_table_row(const epmoei_positions_t &positions,
                                                         const epmoei_raw_index_t &position, bool counts)
{
    if (position.high == 0 && (uint32_t)position.low < (uint32_t)positions.num_positions)
        return positions.cos_sin + (uint64_t)(uint32_t)position.low * (uint32_t)positions.rotary_dim;
    if (counts) epmoei_count_bad(positions.error_word, 1);
    return NULL;
}

/* --------------------------------------------------------------------------------------------------------- rotation */

/* Where the two runs of a thread begin that has pairs [first, first + kRun). Whole runs lie at the same columns in both
 * styles; in GPT-J each then holds both halves of its pairs. Single elements are the two halves of one pair. */
template <int kRun>
__device__ __forceinline__ void epmoei_pair_columns(int64_t &a, int64_t &b, int64_t first, int32_t half,
                                                    epmoe_rope_style_t style)
{
    const bool neighbours = kRun == 1 && style == EPMOE_ROPE_GPTJ;
    a = neighbours ? 2 * first : first;
    b = neighbours ? 2 * first + 1 : first + half;
}

/* cos and sin of a thread's pairs; in GPT-J first those in run a, then those in run b. */
template <int kRun> struct epmoei_turn_t {
    float cosine[kRun];
    float sine[kRun];
};

template <int kCount>
__device__ __forceinline__ void epmoei_load_angles(float *cosine, float *sine, const float *row, int64_t first,
                                                   int32_t half, float direction)
{
    float c[kCount], s[kCount];
    epmoei_load_floats_of(c, row + first);
    epmoei_load_floats_of(s, row + half + first);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        cosine[i] = c[i];
        sine[i] = direction * s[i];
    }
}

template <int kRun>
__device__ __forceinline__ void epmoei_load_turn(epmoei_turn_t<kRun> &turn, const float *row, int64_t first,
                                                 int32_t half, epmoe_rope_style_t style, float direction)
{
    if constexpr (kRun > 1) {
        if (style == EPMOE_ROPE_GPTJ) {
            constexpr int kFew = kRun / 2;
            epmoei_load_angles<kFew>(turn.cosine, turn.sine, row, first / 2, half, direction);
            epmoei_load_angles<kFew>(turn.cosine + kFew, turn.sine + kFew, row, (half + first) / 2, half, direction);
            return;
        }
    }
    epmoei_load_angles<kRun>(turn.cosine, turn.sine, row, first, half, direction);
}

/* Each product is rounded, as on the CPU, which forms no FMAs. */
__device__ __forceinline__ void epmoei_rotate_pair(float &a, float &b, float cosine, float sine)
{
    const float first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
    a = first;
}

template <int kRun>
__device__ __forceinline__ void epmoei_rotate(float (&a)[kRun], float (&b)[kRun], const epmoei_turn_t<kRun> &turn,
                                              epmoe_rope_style_t style)
{
    if constexpr (kRun > 1) {
        if (style == EPMOE_ROPE_GPTJ) {
#pragma unroll
            for (int i = 0; i < kRun / 2; i++) {
                epmoei_rotate_pair(a[2 * i], a[2 * i + 1], turn.cosine[i], turn.sine[i]);
                epmoei_rotate_pair(b[2 * i], b[2 * i + 1], turn.cosine[kRun / 2 + i], turn.sine[kRun / 2 + i]);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kRun; i++) epmoei_rotate_pair(a[i], b[i], turn.cosine[i], turn.sine[i]);
}

#endif
