#include "bench/ceilings.h"

#include "bench/agree.h"
#include "bench/stats.h"

#include "base/device.h"

#if EPMOE_HAVE_CUDA

#include "kernels/random_weights.h"

#include <math.h>
#include <stdlib.h>

#ifndef BENCH_HAVE_CUBLASLT
#define BENCH_HAVE_CUBLASLT 0
#endif

#define READ_BYTES    ((int64_t)4 << 30) /* or less, where ranks have little memory */
#define READ_FRACTION 32                 /* of the device's memory */
#define GEMM_SIZE     8192
#define WARMUP        3
#define REPEATS       10
#define SUSTAINED_US  5e5
#define SUSTAINED_MAX 4000

/* A few repeats as the cases are timed, each as long as on the slowest rank. `times` comes back sorted. */
static epmoe_status_t repeat(const program_t *program, const cuda_t *cuda, cuda_timed_fn run, void *ctx,
                             double times[REPEATS], double *median)
{
    cuda_timing_t timing = {.run = run,
                            .ctx = ctx,
                            .graph = true,
                            .flush = true,
                            .warmup = WARMUP,
                            .iters = REPEATS,
                            .comm = program->comm};
    EPMOEI_CHECK(cuda_time(cuda, &timing, times));
    EPMOEI_CHECK(bench_max(program->comm, times, REPEATS));
    *median = stats_median(times, REPEATS);
    return EPMOE_OK;
}

/* Random elements: on zeros memory and multipliers take less power than they will, and run faster. */
static epmoe_status_t make_random(const cuda_t *cuda, void **data, epmoe_dtype_t dtype, int64_t count, int32_t stream)
{
    EPMOEI_CHECK(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, data, count * epmoe_dtype_size(dtype), "the ceilings"));
    return epmoei_random_fill_sm80(*data, dtype, 1, EPMOEI_RANDOM_ROUTER, stream, count / GEMM_SIZE, GEMM_SIZE, 0, 1, 1,
                                   cuda->stream);
}

typedef struct memory_t {
    const cuda_t *cuda;
    char *data;
    int64_t bytes;
} memory_t;

static epmoe_status_t run_read(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const memory_t *memory = ctx;
    (void)stream, (void)events;
    return cuda_read(memory->cuda, memory->data, memory->bytes);
}

/* `bytes` from the beginning of the data to `to` bytes behind it. */
typedef struct copy_t {
    const memory_t *memory;
    int64_t bytes;
    int64_t to;
    int32_t blocks; /* 0 = as the driver does it */
} copy_t;

static epmoe_status_t run_copy(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const copy_t *copy = ctx;
    char *from = copy->memory->data;
    (void)events;
    return copy->blocks ? cuda_launch_copy(from + copy->to, from, copy->bytes, copy->blocks, stream)
                        : epmoei_memory_copy(EPMOE_BACKEND_CUDA, from + copy->to, from, copy->bytes, stream);
}

/* The best of a few: how far apart what is read and what is written lie decides how often they meet in a bank of the
 * memory, and a device may like many blocks better than long ones. */
static epmoe_status_t measure_copy(ceilings_t *ceilings, const program_t *program, const memory_t *memory)
{
    const int64_t half = memory->bytes / 2, quarter = half / 2, odd = 5 * (1 << 20) + 4096;
    const int32_t few = CUDA_READ_BLOCKS(memory->cuda->num_sms), many = 32 * few;
    const copy_t copies[] = {{memory, half, half, few},           {memory, half, half, 0},
                             {memory, quarter, half + odd, few},  {memory, quarter, half + odd, 0},
                             {memory, quarter, half + odd, many}, {memory, quarter, half, many}};
    ceilings->copy_bytes_per_s = 0.0;
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
        double times[REPEATS], median;
        copy_t copy = copies[i];
        EPMOEI_CHECK(repeat(program, memory->cuda, run_copy, &copy, times, &median));
        ceilings->copy_bytes_per_s = fmax(ceilings->copy_bytes_per_s, 2e6 * (double)copy.bytes / times[0]);
    }
    return EPMOE_OK;
}

static epmoe_status_t measure_memory(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda)
{
    double times[REPEATS], median;
    memory_t memory = {.cuda = cuda};
    void *data = NULL;
    int64_t piece = 4 * (int64_t)GEMM_SIZE;
    memory.bytes = epmoei_min64(READ_BYTES, epmoei_device_current()->memory_bytes / READ_FRACTION) / piece * piece;
    epmoe_status_t status = make_random(cuda, &data, EPMOE_F32, memory.bytes / 4, 0);
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, status), done);
    memory.data = data;
    EPMOEI_CHECK_GOTO(repeat(program, cuda, run_read, &memory, times, &median), done);
    ceilings->read_bytes_per_s = 1e6 * (double)memory.bytes / times[0];
    status = measure_copy(ceilings, program, &memory);
done:
    epmoei_memory_free(EPMOE_BACKEND_CUDA, data);
    return status;
}

static epmoe_status_t run_empty(void *ctx, epmoe_stream_t stream, void *const *events)
{
    (void)ctx, (void)events;
    return cuda_launch_empty(stream);
}

static epmoe_status_t measure_empty_graph(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda)
{
    double times[REPEATS];
    return repeat(program, cuda, run_empty, NULL, times, &ceilings->empty_graph_us);
}

#if BENCH_HAVE_CUBLASLT

#include <cublasLt.h>

#define WORKSPACE_BYTES ((int64_t)64 << 20)

typedef struct gemm_t {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t layout;   /* of a and b: square */
    cublasLtMatrixLayout_t y_layout; /* of a 16-bit type */
    cublasLtMatmulAlgo_t algorithm;
    void *a, *b, *y, *workspace;
} gemm_t;

static epmoe_status_t cublas_status(cublasStatus_t error, const char *what)
{
    if (error == CUBLAS_STATUS_SUCCESS) return EPMOE_OK;
    return epmoei_fail(EPMOE_ERROR_CUDA, "%s: %s", what, cublasLtGetStatusString(error));
}
#define CHECK_CUBLAS(expr) EPMOEI_CHECK(cublas_status(expr, #expr))

static epmoe_status_t choose_algorithm(gemm_t *gemm)
{
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    size_t workspace = WORKSPACE_BYTES;
    int found = 0;
    CHECK_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
    cublasStatus_t error = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                                &workspace, sizeof workspace);
    if (error == CUBLAS_STATUS_SUCCESS)
        error = cublasLtMatmulAlgoGetHeuristic(gemm->handle, gemm->product, gemm->layout, gemm->layout, gemm->y_layout,
                                               gemm->y_layout, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    CHECK_CUBLAS(error);
    if (!found) return epmoei_fail(EPMOE_ERROR_CUDA, "cuBLASLt has no product of %d cubed", GEMM_SIZE);
    gemm->algorithm = result.algo;
    return EPMOE_OK;
}

/* make_random, also of E4M3: bf16 ones, quantised. */
static epmoe_status_t make_operand(const cuda_t *cuda, void **data, epmoe_dtype_t dtype, int32_t stream)
{
    epmoe_status_t status;
    int64_t count = (int64_t)GEMM_SIZE * GEMM_SIZE;
    if (dtype != EPMOE_F8_E4M3) return make_random(cuda, data, dtype, count, stream);
    epmoe_quantize_fp8_args_t quantise = EPMOE_QUANTIZE_FP8_ARGS_INIT;
    void *values = NULL, *scales = NULL;
    EPMOEI_CHECK_GOTO(make_random(cuda, &values, EPMOE_BF16, count, stream), done);
    EPMOEI_CHECK_GOTO(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &scales, GEMM_SIZE * 4, "the ceilings"), done);
    EPMOEI_CHECK_GOTO(epmoei_memory_alloc(EPMOE_BACKEND_CUDA, data, count, "the ceilings"), done);
    quantise.backend = EPMOE_BACKEND_CUDA;
    quantise.num_tokens = quantise.hidden = GEMM_SIZE;
    quantise.dtype = EPMOE_BF16;
    quantise.granularity = EPMOE_GRANULARITY_TOKEN;
    quantise.x = values;
    quantise.q = *data;
    quantise.scale = scales;
    EPMOEI_CHECK_GOTO(epmoe_quantize_fp8(&quantise, cuda->stream), done);
    EPMOEI_CHECK_GOTO(epmoei_stream_wait(EPMOE_BACKEND_CUDA, cuda->stream), done);
done:
    epmoei_memory_free(EPMOE_BACKEND_CUDA, values);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, scales);
    return status;
}

/* y = a b^T of row-major matrices, as the layer multiplies. E4M3 with the sums that the tensor cores make themselves.
 */
static epmoe_status_t make_gemm(gemm_t *gemm, const cuda_t *cuda, epmoe_dtype_t dtype)
{
    bool fp8 = dtype == EPMOE_F8_E4M3;
    epmoe_dtype_t y_dtype = fp8 ? EPMOE_BF16 : dtype;
    cudaDataType_t y_type = y_dtype == EPMOE_BF16 ? CUDA_R_16BF : CUDA_R_16F, type = fp8 ? CUDA_R_8F_E4M3 : y_type;
    cublasOperation_t transposed = CUBLAS_OP_T;
    int8_t fast = 1;
    int64_t count = (int64_t)GEMM_SIZE * GEMM_SIZE;
    CHECK_CUBLAS(cublasLtCreate(&gemm->handle));
    CHECK_CUBLAS(cublasLtMatmulDescCreate(&gemm->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECK_CUBLAS(
        cublasLtMatmulDescSetAttribute(gemm->product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    if (fp8)
        CHECK_CUBLAS(
            cublasLtMatmulDescSetAttribute(gemm->product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    CHECK_CUBLAS(cublasLtMatrixLayoutCreate(&gemm->layout, type, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE));
    CHECK_CUBLAS(cublasLtMatrixLayoutCreate(&gemm->y_layout, y_type, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE));
    EPMOEI_CHECK(choose_algorithm(gemm));
    EPMOEI_CHECK(make_operand(cuda, &gemm->a, dtype, 1));
    EPMOEI_CHECK(make_operand(cuda, &gemm->b, dtype, 2));
    EPMOEI_CHECK(make_random(cuda, &gemm->y, y_dtype, count, 3));
    return epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &gemm->workspace, WORKSPACE_BYTES, "cuBLASLt");
}

static void free_gemm(gemm_t *gemm)
{
    epmoei_memory_free(EPMOE_BACKEND_CUDA, gemm->a);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, gemm->b);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, gemm->y);
    epmoei_memory_free(EPMOE_BACKEND_CUDA, gemm->workspace);
    if (gemm->layout) cublasLtMatrixLayoutDestroy(gemm->layout);
    if (gemm->y_layout) cublasLtMatrixLayoutDestroy(gemm->y_layout);
    if (gemm->product) cublasLtMatmulDescDestroy(gemm->product);
    if (gemm->handle) cublasLtDestroy(gemm->handle);
}

static epmoe_status_t run_gemm(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const gemm_t *gemm = ctx;
    const float one = 1, zero = 0;
    (void)events;
    CHECK_CUBLAS(cublasLtMatmul(gemm->handle, gemm->product, &one, gemm->a, gemm->layout, gemm->b, gemm->layout, &zero,
                                gemm->y, gemm->y_layout, gemm->y, gemm->y_layout, &gemm->algorithm, gemm->workspace,
                                (size_t)WORKSPACE_BYTES, stream));
    return EPMOE_OK;
}

/* A device that multiplies for longer than some ten milliseconds meets its limit of power and lowers its clock; so do
 * layers of many tokens. The median of the second half of so many runs that the device is there. */
static epmoe_status_t sustain(const program_t *program, const cuda_t *cuda, gemm_t *gemm, double us,
                              double *flops_per_s)
{
    epmoe_status_t status;
    const int32_t iters = (int32_t)epmoei_max64(2, epmoei_min64((int64_t)(SUSTAINED_US / us), SUSTAINED_MAX));
    double *times = malloc((size_t)iters * sizeof *times);
    cuda_timing_t timing = {
        .run = run_gemm, .ctx = gemm, .graph = true, .flush = true, .iters = iters, .comm = program->comm};
    EPMOEI_CHECK_GOTO(
        epmoe_comm_agree(program->comm, times ? EPMOE_OK : epmoei_fail(EPMOE_ERROR_OUT_OF_MEMORY, "%d times", iters)),
        done);
    EPMOEI_CHECK_GOTO(cuda_time(cuda, &timing, times), done);
    EPMOEI_CHECK_GOTO(bench_max(program->comm, times, iters), done);
    *flops_per_s = 2e6 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE / stats_median(times + iters / 2, iters - iters / 2);
done:
    free(times);
    return status;
}

static epmoe_status_t measure_gemm(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda,
                                   epmoe_dtype_t dtype)
{
    double times[REPEATS], median;
    gemm_t gemm = {0};
    epmoe_status_t status;
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, make_gemm(&gemm, cuda, dtype)), done);
    EPMOEI_CHECK_GOTO(repeat(program, cuda, run_gemm, &gemm, times, &median), done);
    ceilings->flops_per_s = 2e6 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE / times[0];
    EPMOEI_CHECK_GOTO(sustain(program, cuda, &gemm, median, &ceilings->sustained_flops_per_s), done);
done:
    free_gemm(&gemm);
    return status;
}

#else

static epmoe_status_t measure_gemm(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda,
                                   epmoe_dtype_t dtype)
{
    (void)program, (void)cuda, (void)dtype;
    ceilings->flops_per_s = INFINITY;
    return EPMOE_OK;
}

#endif

epmoe_status_t ceilings_measure_cuda(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda,
                                     epmoe_dtype_t dtype)
{
    EPMOEI_CHECK(measure_memory(ceilings, program, cuda));
    EPMOEI_CHECK(measure_gemm(ceilings, program, cuda, dtype));
    return measure_empty_graph(ceilings, program, cuda);
}

#else

epmoe_status_t ceilings_measure_cuda(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda,
                                     epmoe_dtype_t dtype)
{
    (void)ceilings, (void)program, (void)cuda, (void)dtype;
    return epmoei_fail(EPMOE_ERROR_NOT_SUPPORTED, "%s", epmoei_device_absence());
}

#endif
