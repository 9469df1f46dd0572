#include "bench/op_chain.h"

#include "base/device.h"

#include <string.h>

#define CHAIN_BYTES    ((int64_t)4 << 30) /* or less, where the device has little memory */
#define CHAIN_FRACTION 32                 /* of it */
#define PLACE_BYTES    256

/* Where buffer i of the job lies in the memory of a call; -1 for what the library does not get. */
static int64_t lay_out(const op_job_t *job, int64_t offsets[OP_MAX_MEMORY])
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < job->num_memory; i++) {
        offsets[i] = -1;
        for (const size_t *at = job->kind->pointers; *at && offsets[i] < 0; at++) {
            const void *host;
            memcpy(&host, (const char *)&job->args + *at, sizeof host);
            if (host == job->memory[i].host) offsets[i] = bytes;
        }
        if (offsets[i] >= 0) bytes += epmoei_round_up(buffer_span(&job->memory[i]), PLACE_BYTES);
    }
    return bytes;
}

static int32_t count_calls(const op_chain_t *chain)
{
    if (!chain->job->bench->graph || !chain->bytes) return 1;
    int64_t most = epmoei_min64(CHAIN_BYTES, epmoei_device_current()->memory_bytes / CHAIN_FRACTION);
    return (int32_t)epmoei_max64(1, epmoei_min64(OP_CHAIN_MAX, most / chain->bytes));
}

static epmoe_status_t copy_call(op_chain_t *chain, const int64_t offsets[OP_MAX_MEMORY], int32_t call)
{
    const op_job_t *job = chain->job;
    void *places[OP_MAX_MEMORY] = {NULL};
    for (int32_t i = 0; i < job->num_memory; i++) {
        const buffer_t *buffer = &job->memory[i];
        if (offsets[i] < 0) continue;
        char *base = chain->copies + (call - 1) * chain->bytes + offsets[i];
        places[i] = base + ((char *)buffer->run - buffer->run_base);
        EPMOEI_CHECK(epmoei_memory_copy(EPMOE_BACKEND_CUDA, base, buffer->run_base, buffer_span(buffer), NULL));
    }
    op_job_args(job, places, &chain->args[call]);
    return EPMOE_OK;
}

epmoe_status_t op_chain_create(op_chain_t *chain, const op_job_t *job)
{
    int64_t offsets[OP_MAX_MEMORY];
    *chain = (op_chain_t){.job = job};
    chain->bytes = lay_out(job, offsets);
    chain->calls = count_calls(chain);
    chain->args[0] = job->run_args;
    if (chain->calls == 1) return EPMOE_OK;
    void *copies;
    EPMOEI_CHECK(
        epmoei_memory_alloc(EPMOE_BACKEND_CUDA, &copies, (chain->calls - 1) * chain->bytes, "the calls of a chain"));
    chain->copies = copies;
    for (int32_t call = 1; call < chain->calls; call++) EPMOEI_CHECK(copy_call(chain, offsets, call));
    return epmoei_stream_wait(EPMOE_BACKEND_CUDA, NULL);
}

void op_chain_destroy(op_chain_t *chain)
{
    epmoei_memory_free(EPMOE_BACKEND_CUDA, chain->copies);
    *chain = (op_chain_t){0};
}

epmoe_status_t op_chain_run(void *ctx, epmoe_stream_t stream, void *const *events)
{
    const op_chain_t *chain = ctx;
    (void)events;
    for (int32_t call = 0; call < chain->calls; call++) EPMOEI_CHECK(chain->job->kind->run(&chain->args[call], stream));
    return EPMOE_OK;
}

static epmoe_status_t compare_output(const op_output_t *output, const char *last, int64_t *wrong)
{
    const buffer_t *first = output->out;
    int64_t bytes = buffer_span(first);
    epmoe_status_t status;
    void *host = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for(&host, bytes, "the last call's output"), done);
    EPMOEI_CHECK_GOTO(epmoei_memory_copy(EPMOE_BACKEND_CUDA, host, last, bytes, NULL), done);
    EPMOEI_CHECK_GOTO(epmoei_stream_wait(EPMOE_BACKEND_CUDA, NULL), done);
    *wrong += memcmp(host, first->host_base, (size_t)bytes) != 0;
done:
    epmoei_free(host);
    return status;
}

epmoe_status_t op_chain_compare(const op_chain_t *chain, int64_t *wrong)
{
    const op_job_t *job = chain->job;
    int64_t offsets[OP_MAX_MEMORY];
    if (chain->calls == 1) return EPMOE_OK;
    lay_out(job, offsets);
    const char *last = chain->copies + (chain->calls - 2) * chain->bytes;
    for (int32_t i = 0; i < job->num_outputs; i++) {
        int64_t offset = offsets[job->outputs[i].out - job->memory];
        if (offset >= 0) EPMOEI_CHECK(compare_output(&job->outputs[i], last + offset, wrong));
    }
    return EPMOE_OK;
}
