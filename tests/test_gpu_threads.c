/* Host threads that launch the same kernels with different amounts of shared memory, each on a stream of its own: every
 * call is accepted, and its outputs are those of the same call alone. */
#include "tests/gpu_testing.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { kThreads = 4, kRounds = 1500, kSlots = 1024, kN = 64, kK = 64 };

TestSuite(gpu_threads, .timeout = 300);

/* One thread's calls. What an align takes grows with the experts, to more than 48 KB each; so does what a product
 * takes, and its tile with the rows of an expert. */
typedef struct work_t {
    epmoe_align_args_t align;
    epmoe_grouped_gemm_args_t gemm;
    epmoe_stream_t stream;
    pthread_t thread;
    const char *failed; /* which call */
    char message[256];
} work_t;

static _Atomic int ready;

static void prepare(work_t *work, testing_rng_t *rng, int32_t experts)
{
    int32_t *ids = malloc(kSlots * sizeof *ids), *offsets = malloc((size_t)(experts + 1) * sizeof *offsets);
    uint16_t *x = malloc(kSlots * kK * 2), *w = malloc((size_t)experts * kN * kK * 2);
    cr_assert(ids && offsets && x && w);
    for (int32_t s = 0; s < kSlots; s++) ids[s] = testing_range(rng, 0, experts - 1);
    for (int32_t e = 0; e <= experts; e++) offsets[e] = (int32_t)((int64_t)kSlots * e / experts);
    testing_fill_normal(rng, x, EPMOE_BF16, kSlots * kK, 1.0f);
    testing_fill_normal(rng, w, EPMOE_BF16, (int64_t)experts * kN * kK, 1.0f);

    epmoe_align_args_t *align = &work->align;
    *align = (epmoe_align_args_t)EPMOE_ALIGN_ARGS_INIT;
    align->backend = EPMOE_BACKEND_CUDA;
    align->num_tokens = kSlots, align->top_k = 1, align->num_experts = experts;
    align->ids = gpu_copy_of(ids, kSlots * (int64_t)sizeof *ids);
    align->sorted_ids = gpu_buffer(kSlots * 4, 0);
    align->num_post_padded = gpu_buffer(4, 0);
    cr_assert_eq(epmoe_align_workspace_size(align, &align->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    align->workspace = align->workspace_bytes ? gpu_buffer(align->workspace_bytes, 0) : NULL;

    epmoe_grouped_gemm_args_t *gemm = &work->gemm;
    *gemm = (epmoe_grouped_gemm_args_t)EPMOE_GROUPED_GEMM_ARGS_INIT;
    gemm->backend = EPMOE_BACKEND_CUDA;
    gemm->num_experts = experts, gemm->n = kN, gemm->k = kK, gemm->max_rows = kSlots;
    gemm->expert_offsets = gpu_copy_of(offsets, (experts + 1) * (int64_t)sizeof *offsets);
    gemm->x_dtype = gemm->y_dtype = EPMOE_BF16;
    gemm->x = gpu_copy_of(x, kSlots * kK * 2);
    gemm->weight = (epmoe_weight_t)EPMOE_WEIGHT_INIT;
    gemm->weight.format = EPMOE_FORMAT_BF16;
    gemm->weight.data = gpu_copy_of(w, (int64_t)experts * kN * kK * 2);
    gemm->activation = EPMOE_ACTIVATION_NONE;
    gemm->y = gpu_buffer(kSlots * kN * 2, 0);
    cr_assert_eq(epmoe_grouped_gemm_workspace_size(gemm, &gemm->workspace_bytes), EPMOE_OK, "%s", epmoe_last_error());
    gemm->workspace = gemm->workspace_bytes ? gpu_buffer(gemm->workspace_bytes, 0) : NULL;
    cr_assert_eq(epmoei_stream_create(&work->stream), EPMOE_OK, "%s", epmoe_last_error());
    free(ids), free(offsets), free(x), free(w);
}

static void call(work_t *work)
{
    const char *failed = NULL;
    if (epmoe_align_block_size(&work->align, work->stream) != EPMOE_OK)
        failed = "epmoe_align_block_size";
    else if (epmoe_grouped_gemm(&work->gemm, work->stream) != EPMOE_OK)
        failed = "epmoe_grouped_gemm";
    if (!failed) return;
    work->failed = failed;
    snprintf(work->message, sizeof work->message, "%s", epmoe_last_error());
}

static void *run(void *ctx)
{
    work_t *work = ctx;
    ready++;
    while (ready < kThreads) { /* all begin together */
    }
    for (int32_t round = 0; round < kRounds && !work->failed; round++) call(work);
    if (!work->failed && epmoei_stream_wait(EPMOE_BACKEND_CUDA, work->stream) != EPMOE_OK) {
        work->failed = "the stream";
        snprintf(work->message, sizeof work->message, "%s", epmoe_last_error());
    }
    return NULL;
}

Test(gpu_threads, different_sizes_of_one_kernel)
{
    GPU_TEST_NEEDS_DEVICE();
    static const int32_t experts[kThreads] = {1000, 4096, 16, 2048};
    static work_t works[kThreads];
    void *sorted[kThreads], *y[kThreads];
    testing_rng_t rng = testing_rng(testing_seed());
    for (int32_t i = 0; i < kThreads; i++) {
        prepare(&works[i], &rng, experts[i]);
        call(&works[i]);
        cr_assert_null(works[i].failed, "%s: %s", works[i].failed, works[i].message);
        cr_assert_eq(epmoei_stream_wait(EPMOE_BACKEND_CUDA, works[i].stream), EPMOE_OK, "%s", epmoe_last_error());
        sorted[i] = gpu_get_new(works[i].align.sorted_ids, kSlots * 4);
        y[i] = gpu_get_new(works[i].gemm.y, kSlots * kN * 2);
        gpu_poison(works[i].align.sorted_ids, kSlots * 4);
        gpu_poison(works[i].gemm.y, kSlots * kN * 2);
    }
    for (int32_t i = 0; i < kThreads; i++) cr_assert_eq(pthread_create(&works[i].thread, NULL, run, &works[i]), 0);
    for (int32_t i = 0; i < kThreads; i++) pthread_join(works[i].thread, NULL);
    for (int32_t i = 0; i < kThreads; i++) {
        work_t *work = &works[i];
        cr_expect_null(work->failed, "E %d: %s: %s", experts[i], work->failed, work->message);
        void *got = gpu_get_new(work->align.sorted_ids, kSlots * 4);
        cr_expect(gpu_same("sorted_ids", got, sorted[i], kSlots, 4, kSlots));
        free(got), free(sorted[i]);
        got = gpu_get_new(work->gemm.y, kSlots * kN * 2);
        cr_expect(gpu_same("y", got, y[i], kSlots * kN, 2, kN));
        free(got), free(y[i]);
        const void *all[] = {work->align.ids, work->align.sorted_ids, work->align.num_post_padded,
                             work->gemm.x,    work->align.workspace,  work->gemm.expert_offsets,
                             work->gemm.y,    work->gemm.workspace,   work->gemm.weight.data};
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++) gpu_buffer_free((void *)(uintptr_t)all[j]);
        epmoei_stream_destroy(work->stream);
    }
}
