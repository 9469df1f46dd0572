/* Attention on mma.sync: tiles of keys and values in shared memory, and the two products with an online softmax between
 * them for 16 rows of a warp. Keys and values lie there as rows of 16-byte chunks, whose order is permuted so that
 * neither copies nor ldmatrix meet bank conflicts. */
#ifndef EPMOEI_ATTENTION_MMA_CUDA_CUH
#define EPMOEI_ATTENTION_MMA_CUDA_CUH

#include "dense_layers/attention_cuda.cuh"

namespace
{

/* ------------------------------------------------------------------------------------------- tiles in shared memory */

/* Byte offset of a chunk of a row of kChunks. */
template <int kChunks> __device__ __forceinline__ uint32_t chunk_offset(int32_t row, int32_t chunk)
{
    static_assert(kChunks % 4 == 0, "eight rows of a chunk meet all banks");
    const int32_t turn = kChunks % 8 == 4 ? row >> 1 & 3 : row & 7;
    return (uint32_t)(row * kChunks + (chunk ^ turn)) * 16;
}

/* The type that a cached type is multiplied in. E4M3 is exact in fp16, whose rounding of weights is finer too. */
template <typename T> struct product_type {
    using type = T;
};
template <> struct product_type<uint8_t> {
    using type = __half;
};

template <typename T> __device__ __forceinline__ float cached_to_float(T x) { return epmoei_to_float(x); }
__device__ __forceinline__ float cached_to_float(uint8_t x)
{
    const uint32_t word = epmoei_e4m3x2_to_f16x2(x);
    return __half2float(__ushort_as_half((unsigned short)word));
}

/* The columns of a thread in its row of the accumulators: two of each block of 8, and of E4M3, of which a register
 * holds four neighbours, in blocks 2i and 2i + 1 every other one of four. */
template <typename T> __device__ __forceinline__ int32_t column_of(int32_t block, int32_t i)
{
    const int32_t pair = threadIdx.x % 4;
    return sizeof(T) == 1 ? block / 2 * 16 + pair * 4 + 2 * i + block % 2 : block * 8 + pair * 2 + i;
}

/* The place in a row of q in shared memory of column c, so that its products meet those of E4M3 keys. */
__device__ __forceinline__ int32_t e4m3_place(int32_t c)
{
    const int32_t in_16 = c % 16;
    return c - in_16 + (in_16 / 4 * 2 + in_16 % 2) + (in_16 & 2 ? 8 : 0);
}

/* q of 16 rows: kept in registers where they suffice. */
template <int kCols> struct q_rows_t {
    static constexpr bool kKept = kCols <= 128;
    uint32_t address;
    uint32_t parts[kKept ? kCols / 16 : 1][4];

    static __device__ __forceinline__ void read(uint32_t (&part)[4], uint32_t from, int32_t step)
    {
        const int32_t lane = threadIdx.x % 32, row = lane % 8 + (lane >> 3 & 1) * 8;
        ptx_ldmatrix_x4(part, from + chunk_offset<kCols / 8>(row, 2 * step + (lane >> 4)));
    }
    __device__ __forceinline__ void load(uint32_t from)
    {
        address = from;
        if constexpr (kKept) {
#pragma unroll
            for (int i = 0; i < kCols / 16; i++) read(parts[i], from, i);
        }
    }
    __device__ __forceinline__ void get(uint32_t (&part)[4], int32_t step) const
    {
        if constexpr (kKept) {
#pragma unroll
            for (int i = 0; i < 4; i++) part[i] = parts[step][i];
        } else
            read(part, address, step);
    }
};

/* scores += q keys^T for 16 rows and kKeys keys. */
template <typename T, int kKeys, int kCols>
__device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 8][4], const q_rows_t<kCols> &q, uint32_t keys)
{
    using product_t = typename product_type<T>::type;
    constexpr int kChunks = kCols * (int)sizeof(T) / 16;
    const int32_t lane = threadIdx.x % 32, row = lane % 8 + (lane >> 4) * 8, odd = lane >> 3 & 1;
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; pair++) {
        uint32_t a[2][4];
        q.get(a[0], sizeof(T) == 1 ? 2 * pair : pair);
        if constexpr (sizeof(T) == 1) q.get(a[1], 2 * pair + 1);
#pragma unroll
        for (int n = 0; n < kKeys / 16; n++) {
            uint32_t b[4];
            ptx_ldmatrix_x4(b, keys + chunk_offset<kChunks>(16 * n + row, 2 * pair + odd));
            if constexpr (sizeof(T) == 1) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    ptx_mma_16816(scores[2 * n + i / 2], a[i % 2], epmoei_e4m3x2_to_f16x2(b[i]),
                                  epmoei_e4m3x2_to_f16x2(b[i] >> 16), product_t());
            } else {
                ptx_mma_16816(scores[2 * n], a[0], b[0], b[1], product_t());
                ptx_mma_16816(scores[2 * n + 1], a[0], b[2], b[3], product_t());
            }
        }
    }
}

/* out += weights values for 16 rows and 16 keys, the rows of `values` from row 16 * step on, whose columns begin at
 * chunk `from` of kRowChunks. */
template <typename T, int kCols, int kRowChunks>
__device__ __forceinline__ void multiply_values_16(float (&out)[kCols / 8][4], const uint32_t (&weights)[4],
                                                   uint32_t values, int32_t step, int32_t from)
{
    using product_t = typename product_type<T>::type;
    const int32_t lane = threadIdx.x % 32, row = 16 * step + lane % 8 + (lane >> 3 & 1) * 8, odd = lane >> 4;
#pragma unroll
    for (int pair = 0; pair < kCols * (int)sizeof(T) / 32; pair++) {
        uint32_t b[4];
        ptx_ldmatrix_x4_trans(b, values + chunk_offset<kRowChunks>(row, from + 2 * pair + odd));
        if constexpr (sizeof(T) == 1) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                /* Of two keys: bytes 0 and 2 are the same column, and 1 and 3. */
                const uint32_t low = __byte_perm(b[i / 2 * 2], 0, 0x3120),
                               high = __byte_perm(b[i / 2 * 2 + 1], 0, 0x3120);
                ptx_mma_16816(out[4 * pair + i], weights, epmoei_e4m3x2_to_f16x2(i % 2 ? low >> 16 : low),
                              epmoei_e4m3x2_to_f16x2(i % 2 ? high >> 16 : high), product_t());
            }
        } else {
            ptx_mma_16816(out[2 * pair], weights, b[0], b[1], product_t());
            ptx_mma_16816(out[2 * pair + 1], weights, b[2], b[3], product_t());
        }
    }
}

/* The same for kKeys keys, whose weights are as mma leaves scores. */
template <typename T, int kKeys, int kCols>
__device__ __forceinline__ void multiply_values(float (&out)[kCols / 8][4], const float (&weights)[kKeys / 8][4],
                                                uint32_t values)
{
    using product_t = typename product_type<T>::type;
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] =
                epmoei_pack_pair(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1], product_t());
        multiply_values_16<T, kCols, kCols *(int)sizeof(T) / 16>(out, a, values, k, 0);
    }
}

/* ------------------------------------------------------------------------------------ tiles that a block reads
 * together */

/* Where the kKeys keys of a tile lie, and their values, relative to their head: [2,kKeys]; -1 = not there. Found a tile
 * ahead of the copies. */
template <int kKeys> struct key_rows_t {
    int64_t key[kKeys];
    int64_t value[kKeys];
};

/* The part of the first kKeys threads: keys [first, first + kKeys) as far as they lie in [lo,end). */
template <int kKeys>
__device__ __forceinline__ void find_key_rows(const attention_t &p, key_rows_t<kKeys> *rows, int32_t seq, int32_t first,
                                              int32_t lo, int32_t end, bool counts)
{
    if (threadIdx.x >= kKeys) return;
    const int32_t key = first + (int32_t)threadIdx.x;
    const key_place_t at = find_key(p, seq, key, key >= lo && key < end, counts);
    rows->key[threadIdx.x] = at.block < 0 ? -1 : at.block * p.keys.block + at.slot * p.keys.slot;
    rows->value[threadIdx.x] = at.block < 0 ? -1 : at.block * p.values.block + at.slot * p.values.slot;
}

/* Rows of `columns` columns from `data` on into a tile; zeros for what is not there. */
template <typename T, int kKeys, int kCols, int kThreads>
__device__ __forceinline__ void copy_key_rows(char *shared, const char *data, const int64_t *rows, int32_t columns)
{
    constexpr int kChunks = kCols * (int)sizeof(T) / 16;
    const int32_t used = columns * (int)sizeof(T) / 16;
#pragma unroll 4
    for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
        const int32_t row = i / kChunks, chunk = i % kChunks;
        const int64_t at = rows[row];
        const bool reads = at >= 0 && chunk < used;
        ptx_cp_async_16(ptx_shared_address(shared) + chunk_offset<kChunks>(row, chunk),
                        data + (reads ? at + chunk * 16 : 0), reads ? 16 : 0);
    }
}

/* ------------------------------------------------------------------------------------------------ 16 rows of a warp */

/* What a thread holds of rows r and r + 8, r = lane / 4. `sum` is its own share. */
template <int kCols> struct rows_t {
    float out[kCols / 8][4];
    float top[2]; /* the largest score so far, in units of log2 */
    float sum[2];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < kCols / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) out[i][j] = 0.0f;
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }
};

__device__ __forceinline__ float max_of_quad(float x)
{
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x)
{
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/* Scores, already in units of log2, become weights relative to the largest one so far. fmaxf drops a NaN, whose weight
 * carries it. */
template <int kKeys, int kCols>
__device__ __forceinline__ void weigh(rows_t<kCols> &rows, float (&scores)[kKeys / 8][4])
{
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = rows.top[i];
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++) top = fmaxf(top, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
        top = max_of_quad(top);
        /* Without a score above -inf the differences would be NaN. */
        const float origin = top == -INFINITY ? 0.0f : top;
        decay[i] = ptx_exp2(rows.top[i] - origin);
        rows.top[i] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                scores[n][2 * i + j] = ptx_exp2(scores[n][2 * i + j] - origin);
                sum += scores[n][2 * i + j];
            }
        rows.sum[i] = rows.sum[i] * decay[i] + sum;
    }
    if (!__any_sync(kAllLanes, decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kCols / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) rows.out[n][j] *= decay[j / 2];
}

template <typename T> constexpr uint32_t exponent_bits = 0x7F807F80u; /* of a pair of 16-bit numbers */
template <> constexpr uint32_t exponent_bits<__half> = 0x7C007C00u;

/* Whether a tile of values holds an infinity or a NaN. All lanes of a warp call it. */
template <typename T, int kKeys, int kCols> __device__ __forceinline__ bool holds_special(const char *values)
{
    constexpr int kParts = kKeys * kCols * (int)sizeof(T) / 16;
    bool special = false;
    for (int i = threadIdx.x % 32; i < kParts; i += 32) {
        const uint4 part = ((const uint4 *)values)[i];
        const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (sizeof(T) == 1)
                special |= __vcmpeq4(words[j] & 0x7F7F7F7Fu, 0x7F7F7F7Fu) != 0;
            else
                special |= __vcmpeq2(words[j] & exponent_bits<T>, exponent_bits<T>) != 0;
        }
    }
    return __any_sync(kAllLanes, special);
}

/* out += weights of two rows times one value row, for the rows that see it: 0 times what is no number would spoil a row
 * that does not. */
template <typename T, int kCols, int kRowChunks>
__device__ __forceinline__ void multiply_value_seen(float (&out)[kCols / 8][4], float low, float high,
                                                    const char *values, int32_t row, int32_t from, int32_t key,
                                                    const bounds_t &bounds)
{
    constexpr int kPerChunk = 16 / (int)sizeof(T);
    const bool sees_low = key >= bounds.lo[0] && key < bounds.hi[0];
    const bool sees_high = key >= bounds.lo[1] && key < bounds.hi[1];
#pragma unroll
    for (int block = 0; block < kCols / 8; block++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int32_t column = column_of<T>(block, i);
            const T *chunk = (const T *)(values + chunk_offset<kRowChunks>(row, from + column / kPerChunk));
            const float value = cached_to_float(chunk[column % kPerChunk]);
            if (sees_low) out[block][i] += low * value;
            if (sees_high) out[block][2 + i] += high * value;
        }
}

/* multiply_values where rows see different keys and some value is no number. */
template <typename T, int kKeys, int kCols>
__device__ __forceinline__ void multiply_values_seen(float (&out)[kCols / 8][4], const float (&weights)[kKeys / 8][4],
                                                     const char *values, int32_t first, const bounds_t &bounds)
{
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++)
#pragma unroll 1
        for (int j = 0; j < 8; j++) {
            const int32_t lane = (threadIdx.x % 32 & ~3) + j / 2;
            const float low = __shfl_sync(kAllLanes, j & 1 ? weights[n][1] : weights[n][0], lane);
            const float high = __shfl_sync(kAllLanes, j & 1 ? weights[n][3] : weights[n][2], lane);
            multiply_value_seen<T, kCols, kCols *(int)sizeof(T) / 16>(out, low, high, values, 8 * n + j, 0,
                                                                      first + 8 * n + j, bounds);
        }
}

/* A tile of keys from `first` on. factor: of the scores of the two rows. masked: some row sees not all of them; ragged:
 * and some of those are not zeros, since rows of other warps see them. */
template <typename T, int kKeys, int kCols>
__device__ __forceinline__ void attend(rows_t<kCols> &rows, const q_rows_t<kCols> &q, const char *keys,
                                       const char *values, const float (&factor)[2], int32_t first,
                                       const bounds_t &bounds, bool masked, bool ragged)
{
    float scores[kKeys / 8][4] = {};
    multiply_keys<T, kKeys, kCols>(scores, q, ptx_shared_address(keys));
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) scores[n][j] *= factor[j / 2];
    if (masked) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int32_t key = first + 8 * n + threadIdx.x % 4 * 2 + j % 2;
                const bool seen = key >= bounds.lo[j / 2] && key < bounds.hi[j / 2];
                scores[n][j] = seen ? scores[n][j] : -INFINITY;
            }
    }
    weigh<kKeys>(rows, scores);
    if (masked && ragged && holds_special<T, kKeys, kCols>(values))
        multiply_values_seen<T, kKeys, kCols>(rows.out, scores, values, first, bounds);
    else
        multiply_values<T, kKeys, kCols>(rows.out, scores, ptx_shared_address(values));
}

/* -------------------------------------------------------------------------------------------------------- q */

/* kRows rows of q as a tile in shared memory, zeros where there is no row or column. kThreads threads, of which
 * kThreads / kRows neighbours take a row. E4M3 keys: q in fp16, each row times a power of two that brings its largest
 * finite magnitude to [1,2); factors[row] takes it back. */
template <typename T, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_q(const attention_t &p, const tile_t &tile, int32_t head_unit, char *shared,
                                       float *factors)
{
    constexpr int kLanes = kThreads / kRows, kChunks = kCols / 8;
    static_assert(kLanes >= 1 && kLanes <= 32, "a row is one warp's");
    const int32_t r = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const row_t row = find_row(p, tile, head_unit, r);
    const uint16_t *from = (const uint16_t *)p.q + (int64_t)row.token * p.q_stride + (int64_t)row.head * p.head_dim;
    float factor = 1.0f;
    if constexpr (sizeof(T) == 1) {
        float most = 0.0f;
        for (int chunk = lane; chunk < kChunks; chunk += kLanes) {
            const uint4 part = ptx_load_16(from + chunk * 8, row.live && chunk * 8 < p.head_dim);
            float values[8];
            if (p.dtype == EPMOE_BF16)
                epmoei_unpack_part<__nv_bfloat16>(values, part);
            else
                epmoei_unpack_part<__half>(values, part);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (fabsf(values[i]) < INFINITY) most = fmaxf(most, fabsf(values[i]));
        }
#pragma unroll
        for (int offset = kLanes / 2; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
        /* The power of two at or below it, but not so small that its inverse overflows. */
        factor = __uint_as_float(max(__float_as_uint(most) & 0x7F800000u, 0x01000000u));
        if (lane == 0) factors[r] = factor;
    }
    for (int chunk = lane; chunk < kChunks; chunk += kLanes) {
        const uint4 part = ptx_load_16(from + chunk * 8, row.live && chunk * 8 < p.head_dim);
        if constexpr (sizeof(T) == 1) {
            float values[8];
            if (p.dtype == EPMOE_BF16)
                epmoei_unpack_part<__nv_bfloat16>(values, part);
            else
                epmoei_unpack_part<__half>(values, part);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int32_t place = e4m3_place(chunk * 8 + i);
                __half *to = (__half *)(shared + chunk_offset<kChunks>(r, place / 8));
                to[place % 8] = __float2half_rn(values[i] / factor);
            }
        } else
            *(uint4 *)(shared + chunk_offset<kChunks>(r, chunk)) = part;
    }
}

/* What a thread's scores are multiplied by; factors as load_q left them. */
template <typename T>
__device__ __forceinline__ void find_factors(float (&factor)[2], const attention_t &p, const float *factors, int32_t r)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        factor[i] = sizeof(T) == 1 ? p.scale_log2 * (p.k_scale ? *p.k_scale : 1.0f) * factors[r + 8 * i] : p.scale_log2;
}

} // namespace

#endif
