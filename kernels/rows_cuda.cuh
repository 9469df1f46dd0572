/* What the kernels over rows of elements share: runs of elements as fp32, and the grid that cuts [rows,cols]. */
#ifndef EPMOEI_ROWS_CUDA_CUH
#define EPMOEI_ROWS_CUDA_CUH

#include "kernels/cuda_common.cuh"

/* kCount elements: one at any address, or a multiple of 16 bytes at an address aligned to 16. */
template <int kCount, typename T> __device__ __forceinline__ void epmoei_load_run(float (&values)[kCount], const T *run)
{
    if constexpr (kCount == 1)
        values[0] = epmoei_to_float(*run);
    else {
        constexpr int kPart = epmoei_vec16<T>::kCount;
        static_assert(kCount % kPart == 0, "a run is whole vectors");
#pragma unroll
        for (int first = 0; first < kCount; first += kPart) {
            epmoei_vec16<T> vec = *(const epmoei_vec16<T> *)(run + first);
#pragma unroll
            for (int i = 0; i < kPart; i++) values[first + i] = epmoei_to_float(vec.element[i]);
        }
    }
}

template <int kCount, typename T>
__device__ __forceinline__ void epmoei_store_run(T *run, const float (&values)[kCount])
{
    if constexpr (kCount == 1)
        *run = epmoei_from_float<T>(values[0]);
    else {
        constexpr int kPart = epmoei_vec16<T>::kCount;
#pragma unroll
        for (int first = 0; first < kCount; first += kPart) {
            epmoei_vec16<T> vec;
#pragma unroll
            for (int i = 0; i < kPart; i++) vec.element[i] = epmoei_from_float<T>(values[first + i]);
            *(epmoei_vec16<T> *)(run + first) = vec;
        }
    }
}

/* blockIdx.x and threadIdx.x are the place in the row, one unit of work per thread; blockIdx.y is the first row and
 * gridDim.y the step to the next. */
struct epmoei_row_grid_t {
    dim3 blocks;
    dim3 threads;
};

static inline epmoei_row_grid_t epmoei_row_grid(int64_t rows, int64_t units_per_row)
{
    const int64_t kMostThreads = 256, kFewestThreads = 64, kBlocksPerSm = 16, kMostBlocksY = 65535;
    const epmoei_device_info_t *device = epmoei_device_current();
    int64_t num_sms = device ? device->num_sms : 1;
    int64_t threads = kMostThreads;
    /* Few rows: smaller pieces, so that every SM gets one. */
    while (threads > kFewestThreads && rows * epmoei_ceil_div(units_per_row, threads) < num_sms) threads /= 2;
    int64_t pieces = epmoei_ceil_div(units_per_row, threads);
    threads = epmoei_round_up(epmoei_ceil_div(units_per_row, pieces), 32);
    int64_t blocks_y = epmoei_max64(1, num_sms * kBlocksPerSm / pieces);
    blocks_y = epmoei_min64(epmoei_min64(blocks_y, kMostBlocksY), rows);
    epmoei_row_grid_t grid;
    grid.blocks = dim3((unsigned)pieces, (unsigned)blocks_y);
    grid.threads = dim3((unsigned)threads);
    return grid;
}

#endif
