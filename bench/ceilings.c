#include "bench/ceilings.h"

#include "bench/agree.h"

#include "base/device.h"

#include <cblas.h>
#include <math.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MACHINE_BYTES   ((int64_t)512 << 20) /* read by all ranks of a machine: more than its caches hold */
#define DEFAULT_CACHE   ((int64_t)32 << 20)
#define GEMM_SIZE       768
#define MEASURE_REPEATS 5

/* What each rank tells the others. */
typedef struct machine_info_t {
    char host[256];
    cpu_set_t cores;
    int32_t num_threads;
    unsigned char uuid[16]; /* of the device, zero on the CPU */
} machine_info_t;

static volatile uint64_t read_sink; /* keeps the reads alive */

/* Prefetching a page ahead, which lifts a core's own limit of lines in flight. */
static void read_all(const uint64_t *buffer, int64_t bytes)
{
    enum { kLine = 8, kAhead = 512 }; /* in elements */
    uint64_t sum = 0;
    int64_t lines = bytes / 8 / kLine;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t line = 0; line < lines; line++) {
        const uint64_t *data = buffer + line * kLine;
        __builtin_prefetch(data + kAhead);
        for (int32_t i = 0; i < kLine; i++) sum += data[i];
    }
    read_sink = sum;
}

void ceilings_flush(const ceilings_t *ceilings) { read_all(ceilings->buffer, ceilings->flush_bytes); }

static bool same_device(const machine_info_t *a, const machine_info_t *b)
{
    return !strcmp(a->host, b->host) && !memcmp(a->uuid, b->uuid, sizeof a->uuid);
}

/* Who shares a device: the physical one, whatever ordinal each rank sees it under. */
static void find_devices(ceilings_t *ceilings, const machine_info_t *all, int32_t size)
{
    for (int32_t r = 0; r < size; r++) {
        int32_t first = 0, ranks = 0;
        while (!same_device(&all[first], &all[r])) first++;
        ceilings->domain[r] = first;
        for (int32_t i = 0; i < size; i++) ranks += same_device(&all[i], &all[r]);
        ceilings->ranks_per_device = ranks > ceilings->ranks_per_device ? ranks : ceilings->ranks_per_device;
    }
}

static epmoe_status_t find_machines(ceilings_t *ceilings, const program_t *program, bool cuda)
{
    epmoe_status_t status = EPMOE_OK;
    int32_t size = program->size;
    machine_info_t own = {.num_threads = program->num_threads}, *all = NULL;
    gethostname(own.host, sizeof own.host - 1);
    CPU_ZERO(&own.cores);
    sched_getaffinity(0, sizeof own.cores, &own.cores);
    if (cuda) memcpy(own.uuid, epmoei_device_current()->uuid, sizeof own.uuid);
    status = epmoei_alloc_for((void **)&all, size * (int64_t)sizeof own, "machines");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&ceilings->domain, size * (int64_t)4, "machines");
    EPMOEI_CHECK_GOTO(epmoe_comm_agree(program->comm, status), done);
    EPMOEI_CHECK_GOTO(epmoe_comm_all_gather(program->comm, &own, all, sizeof own), done);
    for (int32_t r = 0; r < size; r++) {
        int32_t first = 0, threads = 0;
        cpu_set_t cores;
        CPU_ZERO(&cores);
        while (strcmp(all[first].host, all[r].host)) first++;
        ceilings->domain[r] = first;
        if (first != r) continue;
        ceilings->num_machines++;
        for (int32_t i = r; i < size; i++) {
            if (strcmp(all[i].host, all[r].host)) continue;
            threads += all[i].num_threads;
            CPU_OR(&cores, &cores, &all[i].cores);
        }
        ceilings->shares_cores = ceilings->shares_cores || (!cuda && threads > CPU_COUNT(&cores));
        if (threads <= ceilings->most_threads) continue;
        ceilings->most_threads = threads;
        ceilings->cores = CPU_COUNT(&cores);
    }
    if (cuda) find_devices(ceilings, all, size);
done:
    epmoei_free(all);
    return status;
}

/* The best of a few repeats of `seconds`, each begun together by all ranks and as long as on the slowest. */
static epmoe_status_t measure(const program_t *program, void (*run)(void *ctx), void *ctx, double *best)
{
    *best = INFINITY;
    for (int32_t i = 0; i < MEASURE_REPEATS; i++) {
        EPMOEI_CHECK(epmoe_comm_agree(program->comm, EPMOE_OK));
        double start = epmoei_now_seconds(), seconds;
        run(ctx);
        seconds = epmoei_now_seconds() - start;
        EPMOEI_CHECK(bench_max(program->comm, &seconds, 1));
        *best = seconds < *best ? seconds : *best;
    }
    return EPMOE_OK;
}

static void run_read(void *ctx)
{
    const ceilings_t *ceilings = ctx;
    read_all(ceilings->buffer, ceilings->buffer_bytes);
}

static void run_gemm(void *ctx)
{
    const float *a = ctx, *b = a + GEMM_SIZE * GEMM_SIZE;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE, 1, a, GEMM_SIZE, b, GEMM_SIZE,
                0, (float *)ctx + 2 * GEMM_SIZE * GEMM_SIZE, GEMM_SIZE);
}

static epmoe_status_t measure_cpu(ceilings_t *ceilings, const program_t *program)
{
    epmoe_status_t status;
    int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE), gemm_bytes = (int64_t)3 * GEMM_SIZE * GEMM_SIZE * 4;
    if (cache <= 0) cache = DEFAULT_CACHE;
    ceilings->flush_bytes = epmoei_min64(cache, MACHINE_BYTES) / program->local_size / 64 * 64;
    ceilings->buffer_bytes = epmoei_max64(MACHINE_BYTES / program->local_size / 64 * 64, gemm_bytes);
    status = epmoei_alloc_for((void **)&ceilings->buffer, ceilings->buffer_bytes, "cache flush buffer");
    EPMOEI_CHECK(epmoe_comm_agree(program->comm, status));
    /* A ceiling must not be that of the page tables: large pages where the system gives them. */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), address = (uintptr_t)ceilings->buffer;
    uintptr_t begin = (address + page - 1) / page * page,
              end = (address + (uintptr_t)ceilings->buffer_bytes) / page * page;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
    int64_t count = ceilings->buffer_bytes / 8;
    /* Each thread's pages near it, and numbers that are 1.0 to the GEMM. */
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) ceilings->buffer[i] = 0x3F8000003F800000u;

    double seconds;
    EPMOEI_CHECK(measure(program, run_read, ceilings, &seconds));
    ceilings->read_bytes_per_s = (double)ceilings->buffer_bytes / seconds;
    openblas_set_num_threads(program->num_threads);
    EPMOEI_CHECK(measure(program, run_gemm, ceilings->buffer, &seconds));
    ceilings->flops_per_s = 2.0 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE / seconds;
    return EPMOE_OK;
}

epmoe_status_t ceilings_measure(ceilings_t *ceilings, const program_t *program, const cuda_t *cuda, epmoe_dtype_t dtype)
{
    *ceilings = (ceilings_t){0};
    EPMOEI_CHECK(find_machines(ceilings, program, cuda != NULL));
    return cuda ? ceilings_measure_cuda(ceilings, program, cuda, dtype) : measure_cpu(ceilings, program);
}

void ceilings_free(ceilings_t *ceilings)
{
    epmoei_free(ceilings->buffer);
    epmoei_free(ceilings->domain);
    *ceilings = (ceilings_t){0};
}
