/* Ways to call an op other than plainly: in a captured graph, with bases off their alignment, with bad ids. */
#include "tests/checkcuda/check.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

static void cuda_must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}
#define CUDA_MUST(expr) cuda_must(expr, #expr)

void check_graph(check_case_t *c, void (*refill)(check_case_t *c, int32_t round, void *ctx), void *ctx)
{
    enum { kReplays = 3 };
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CUDA_MUST(cudaStreamBeginCapture(check_stream, cudaStreamCaptureModeGlobal));
    epmoe_status_t status = check_launch(c);
    if (status != EPMOE_OK) check_fail(c, "status %d while capturing: %s", (int)status, epmoe_last_error());
    cudaError_t error = cudaStreamEndCapture(check_stream, &graph);
    if (error != cudaSuccess) {
        cudaGetLastError();
        check_fail(c, "the call cannot be captured: %s", cudaGetErrorString(error));
        return;
    }
    CUDA_MUST(cudaGraphInstantiate(&exec, graph, 0));
    for (int32_t round = 0; status == EPMOE_OK && round < kReplays; round++) {
        refill(c, round, ctx);
        if (!check_expect(c)) break;
        check_upload(c);
        CUDA_MUST(cudaGraphLaunch(exec, check_stream));
        if (!check_download(c) || !check_outputs(c)) {
            check_fail(c, "replay %d of the graph is wrong", round);
            break;
        }
    }
    CUDA_MUST(cudaGraphExecDestroy(exec));
    CUDA_MUST(cudaGraphDestroy(graph));
}

static bool outputs_are_as_sent(check_case_t *c)
{
    for (int32_t i = 0; i < c->num_fields; i++) {
        const check_field_t *field = &c->fields[i];
        if (field->got && memcmp(field->got, field->sent, (size_t)field->bytes)) return false;
    }
    return true;
}

void check_misaligned(check_case_t *c)
{
    check_upload(c);
    for (int32_t i = 0; i < c->num_fields; i++) {
        check_field_t *field = &c->fields[i];
        if (field->alignment <= 1 || !field->host) continue;
        char *aligned = field->device;
        field->device += field->alignment / 2;
        epmoe_status_t status = check_launch(c);
        const char *message = epmoe_last_error();
        if (status != EPMOE_ERROR_INVALID_ARGUMENT || !strstr(message, field->name))
            check_fail(c, "%s off its alignment: status %d, '%s'", field->name, (int)status, message);
        field->device = aligned;
    }
    if (check_download(c) && !outputs_are_as_sent(c)) check_fail(c, "a refused call wrote an output");
}

void check_bad_ids(check_case_t *c, const char *name, const void *data, int32_t count)
{
    if (!check_expect(c)) return;
    check_upload(c);
    check_field_t *field = check_find(c, name);
    char *bad = testing_buffer(field->bytes, 0);
    memcpy(bad, data, (size_t)field->bytes);
    check_send(field, bad);
    epmoe_status_t status = check_launch(c);
    if (status != EPMOE_OK)
        check_fail(c, "bad ids: status %d: %s", (int)status, epmoe_last_error());
    else if (check_download(c))
        check_outputs(c);

    char text[32];
    snprintf(text, sizeof text, "%d ids", count);
    status = check_launch(c);
    if (status != EPMOE_ERROR_INVALID_ARGUMENT || strncmp(epmoe_last_error(), text, strlen(text)))
        check_fail(c, "after %d bad ids the next call gave status %d: %s", count, (int)status, epmoe_last_error());
    check_upload(c); /* the outputs too: those of an op in place have been used up */
    status = check_launch(c);
    if (status != EPMOE_OK)
        check_fail(c, "the call after the report gave status %d: %s", (int)status, epmoe_last_error());
    else if (check_download(c))
        check_outputs(c);
    testing_buffer_free(bad);
}
