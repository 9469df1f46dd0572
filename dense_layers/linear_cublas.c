#include "dense_layers/linear_cublas.h"

#include "base/device.h"
#include "base/dtype.h"

#if EPMOE_HAVE_CUDA && EPMOE_HAVE_CUBLASLT

#include <cublasLt.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define WORKSPACE_BYTES ((int64_t)32 << 20)
#define MOST_DEVICES    64
#define MOST_CHOICES    1024 /* a power of two */

#define PASTE_NAME(major)   "libcublasLt.so." #major
#define LIBRARY_NAME(major) PASTE_NAME(major)

/* X(name): the functions that are looked up. Those with _internal are what cublasLt.h's inline ones call. */
#define FUNCTIONS(X)                                                                                                   \
    X(cublasLtCreate)                                                                                                  \
    X(cublasLtGetStatusString)                                                                                         \
    X(cublasLtMatmul)                                                                                                  \
    X(cublasLtMatmulAlgoGetHeuristic)                                                                                  \
    X(cublasLtMatmulDescInit_internal)                                                                                 \
    X(cublasLtMatmulDescSetAttribute)                                                                                  \
    X(cublasLtMatmulPreferenceInit_internal)                                                                           \
    X(cublasLtMatmulPreferenceSetAttribute)                                                                            \
    X(cublasLtMatrixLayoutInit_internal)                                                                               \
    X(cublasLtMatrixLayoutSetAttribute)

static struct {
#define MEMBER(name) __typeof__(&name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} lt;

/* What decides the algorithm. */
typedef struct shape_t {
    int32_t device, n, k, rows, heads;
    epmoe_dtype_t x_dtype, y_dtype; /* w has x_dtype */
    int32_t alignment;              /* bytes, of all addresses */
} shape_t;

typedef struct choice_t {
    shape_t shape; /* n 0: free */
    bool found;    /* false: cuBLASLt has nothing for it */
    cublasLtMatmulAlgo_t algorithm;
} choice_t;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;
static cublasLtHandle_t handles[MOST_DEVICES];
static choice_t choices[MOST_CHOICES];

static void load(void)
{
    void *library = dlopen(LIBRARY_NAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    loaded = true;
    /* A function's address is copied as bytes: ISO C has no conversion from void *. */
#define FIND(name)                                                                                                     \
    {                                                                                                                  \
        void *found = dlsym(library, #name);                                                                           \
        memcpy(&lt.name, &found, sizeof found);                                                                        \
        loaded = loaded && found;                                                                                      \
    }
    FUNCTIONS(FIND)
#undef FIND
}

/* NULL where there is none. */
static cublasLtHandle_t handle_of(int32_t device)
{
    pthread_once(&once, load);
    if (!loaded || device < 0 || device >= MOST_DEVICES) return NULL;
    pthread_mutex_lock(&mutex);
    if (!handles[device] && lt.cublasLtCreate(&handles[device]) != CUBLAS_STATUS_SUCCESS) handles[device] = NULL;
    cublasLtHandle_t handle = handles[device];
    pthread_mutex_unlock(&mutex);
    return handle;
}

int64_t epmoei_linear_cublas_workspace(void)
{
    return handle_of(epmoei_device_current_ordinal()) ? WORKSPACE_BYTES : 0;
}

/* ------------------------------------------------------------------------------------------------------ a product */

/* Column by column, as cuBLASLt counts, y^T [n,rows] = w x^T of a w [k,n] that is transposed; a batch is the heads. */
typedef struct product_t {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t w, x, y;
} product_t;

static cudaDataType_t type_of(epmoe_dtype_t dtype)
{
    return dtype == EPMOE_BF16 ? CUDA_R_16BF : dtype == EPMOE_F16 ? CUDA_R_16F : CUDA_R_32F;
}

static cublasStatus_t make_layout(cublasLtMatrixLayoutOpaque_t *layout, epmoe_dtype_t dtype, int32_t rows, int32_t cols,
                                  int64_t leading, int32_t batch, int64_t batch_stride)
{
    cublasStatus_t status = lt.cublasLtMatrixLayoutInit_internal(layout, sizeof *layout, type_of(dtype), (uint64_t)rows,
                                                                 (uint64_t)cols, leading);
    if (status != CUBLAS_STATUS_SUCCESS || batch == 1) return status;
    status = lt.cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return lt.cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride,
                                               sizeof batch_stride);
}

static cublasStatus_t make_product(product_t *product, const shape_t *shape)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    int64_t n = shape->n, k = shape->k, heads = shape->heads;
    cublasStatus_t status = lt.cublasLtMatmulDescInit_internal(&product->operation, sizeof product->operation,
                                                               CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmulDescSetAttribute(&product->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                                   sizeof transposed);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(&product->w, shape->x_dtype, shape->k, shape->n, k, shape->heads, n * k);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(&product->x, shape->x_dtype, shape->k, shape->rows, heads * k, shape->heads, k);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(&product->y, shape->y_dtype, shape->n, shape->rows, heads * n, shape->heads, n);
    return status;
}

/* ---------------------------------------------------------------------------------------------- the choice of a way */

/* Of many rows the next few hundred take the same way, so that prompts of any length have few. */
static int32_t rows_like(int32_t rows)
{
    int64_t step = rows <= 128 ? 1 : rows <= 2048 ? 128 : 1024;
    return (int32_t)epmoei_min64(epmoei_round_up(rows, step), INT32_MAX);
}

static const cublasLtMatmulPreferenceAttributes_t alignments[] = {
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
};

/* Sums of parts of K come together in fp32 and in a fixed order, so that the same call gives the same bits. */
static cublasStatus_t make_preference(cublasLtMatmulPreferenceOpaque_t *preference, const shape_t *shape)
{
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, alignment = (uint32_t)shape->alignment;
    const uint64_t workspace = WORKSPACE_BYTES;
    cublasStatus_t status = lt.cublasLtMatmulPreferenceInit_internal(preference, sizeof *preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                         &workspace, sizeof workspace);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                         &reductions, sizeof reductions);
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0] && status == CUBLAS_STATUS_SUCCESS; i++)
        status = lt.cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &alignment, sizeof alignment);
    return status;
}

static bool ask(cublasLtHandle_t handle, const shape_t *shape, cublasLtMatmulAlgo_t *algorithm)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result;
    product_t product;
    int found = 0;
    if (make_product(&product, shape) != CUBLAS_STATUS_SUCCESS ||
        make_preference(&preference, shape) != CUBLAS_STATUS_SUCCESS)
        return false;
    cublasStatus_t status = lt.cublasLtMatmulAlgoGetHeuristic(handle, &product.operation, &product.w, &product.x,
                                                              &product.y, &product.y, &preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0 || result.state != CUBLAS_STATUS_SUCCESS) return false;
    *algorithm = result.algo;
    return true;
}

static uint32_t hash(const shape_t *shape)
{
    const int32_t numbers[] = {
        shape->device,           shape->n,        shape->k, shape->rows, shape->heads, (int32_t)shape->x_dtype,
        (int32_t)shape->y_dtype, shape->alignment};
    uint32_t code = 2166136261u;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) code = (code ^ (uint32_t)numbers[i]) * 16777619u;
    return code ^ code >> 15;
}

static bool same(const shape_t *a, const shape_t *b)
{
    return a->device == b->device && a->n == b->n && a->k == b->k && a->rows == b->rows && a->heads == b->heads &&
           a->x_dtype == b->x_dtype && a->y_dtype == b->y_dtype && a->alignment == b->alignment;
}

/* Two shapes that meet in one place take turns there: what is asked for anew is the same again. */
static bool choose(cublasLtHandle_t handle, shape_t shape, cublasLtMatmulAlgo_t *algorithm)
{
    shape.rows = rows_like(shape.rows);
    pthread_mutex_lock(&mutex);
    choice_t *choice = &choices[hash(&shape) % MOST_CHOICES];
    if (choice->shape.n == 0 || !same(&choice->shape, &shape)) {
        choice->shape = shape;
        choice->found = ask(handle, &shape, &choice->algorithm);
    }
    bool found = choice->found;
    *algorithm = choice->algorithm;
    pthread_mutex_unlock(&mutex);
    return found;
}

/* The largest power of two up to 256 that divides all addresses. */
static int32_t alignment_of(const void *w, const void *x, const void *y)
{
    uintptr_t all = (uintptr_t)w | (uintptr_t)x | (uintptr_t)y | EPMOEI_ALIGNMENT;
    return (int32_t)(all & (~all + 1));
}

static bool may_multiply(const epmoei_linear_run_t *run, const epmoei_linear_t *linear)
{
    if (linear->bias || run->workspace_bytes < WORKSPACE_BYTES) return false;
    return linear->format == epmoei_format_of_dtype(run->dtype);
}

epmoe_status_t epmoei_linear_cublas(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows,
                                    const void *x, epmoe_dtype_t y_dtype, void *y, bool *done)
{
    *done = false;
    int32_t device = epmoei_device_current_ordinal();
    cublasLtHandle_t handle = handle_of(device);
    shape_t shape = {.device = device,
                     .n = linear->n,
                     .k = linear->k,
                     .rows = rows,
                     .heads = linear->heads,
                     .x_dtype = run->dtype,
                     .y_dtype = y_dtype,
                     .alignment = alignment_of(linear->weight, x, y)};
    const float one = 1, zero = 0;
    cublasLtMatmulAlgo_t algorithm;
    product_t product;
    if (!handle || rows == 0 || !may_multiply(run, linear)) return EPMOE_OK;
    if (!choose(handle, shape, &algorithm)) return EPMOE_OK;
    cublasStatus_t status = make_product(&product, &shape);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmul(handle, &product.operation, &one, linear->weight, &product.w, x, &product.x, &zero,
                                   y, &product.y, y, &product.y, &algorithm, run->workspace, (size_t)WORKSPACE_BYTES,
                                   run->stream);
    /* The way that was chosen for a number of rows nearby is not one for these. */
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return EPMOE_OK;
    if (status != CUBLAS_STATUS_SUCCESS)
        return epmoei_fail(EPMOE_ERROR_CUDA, "cublasLtMatmul: %s", lt.cublasLtGetStatusString(status));
    *done = true;
    return EPMOE_OK;
}

#else

int64_t epmoei_linear_cublas_workspace(void) { return 0; }

epmoe_status_t epmoei_linear_cublas(const epmoei_linear_run_t *run, const epmoei_linear_t *linear, int32_t rows,
                                    const void *x, epmoe_dtype_t y_dtype, void *y, bool *done)
{
    (void)run, (void)linear, (void)rows, (void)x, (void)y_dtype, (void)y;
    *done = false;
    return EPMOE_OK;
}

#endif
