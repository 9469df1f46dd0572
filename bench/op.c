#include "bench/op.h"

#include "bench/op_chain.h"
#include "bench/report.h"
#include "bench/stats.h"

#include "base/device.h"
#include "base/dtype.h"
#include "base/fp8.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static epmoe_status_t time_cpu(op_job_t *job, double *times)
{
    const bench_t *bench = job->bench;
    for (int32_t i = -bench->warmup; i < bench->iters; i++) {
        ceilings_flush(&bench->ceilings);
        double start = epmoei_now_seconds();
        EPMOEI_CHECK(op_job_run(job));
        if (i >= 0) times[i] = 1e6 * (epmoei_now_seconds() - start);
    }
    return EPMOE_OK;
}

static epmoe_status_t time_cuda(op_job_t *job, op_chain_t *chain, double *times)
{
    const bench_t *bench = job->bench;
    cuda_timing_t timing = {.run = op_chain_run,
                            .ctx = chain,
                            .graph = bench->graph,
                            .flush = true,
                            .warmup = bench->warmup,
                            .iters = bench->iters,
                            .comm = bench->program->comm};
    EPMOEI_CHECK(cuda_time(&bench->cuda, &timing, times));
    for (int32_t i = 0; i < bench->iters; i++) times[i] /= chain->calls;
    EPMOEI_CHECK(epmoei_error_word_check());
    for (int32_t i = 0; i < job->num_outputs; i++) EPMOEI_CHECK(buffer_download(job->outputs[i].out));
    return EPMOE_OK;
}

static epmoe_status_t time_job(op_job_t *job, op_chain_t *chain, case_result_t *result)
{
    bool cuda = job->bench->backend == EPMOE_BACKEND_CUDA;
    int32_t iters = job->bench->iters;
    epmoe_status_t status;
    double *times = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&times, (int64_t)iters * 8, "times"), done);
    EPMOEI_CHECK_GOTO(cuda ? time_cuda(job, chain, times) : time_cpu(job, times), done);
    result->calls = chain->calls;
    result->us_median = stats_median(times, iters);
    result->us_min = times[0];
    result->us_max = times[iters - 1];
done:
    epmoei_free(times);
    return status;
}

static bool computed_by_reference(const op_job_t *job, int64_t row)
{
    if (!job->reference_index) return true;
    for (int32_t i = 0; i < job->reference_rows; i++)
        if (job->reference_index[i] == row) return true;
    return false;
}

static double value_at(const void *row, epmoe_dtype_t dtype, int64_t c)
{
    return (double)(dtype == EPMOE_F8_E4M3 ? epmoei_e4m3_to_f32(((const uint8_t *)row)[c])
                                           : epmoei_load(row, dtype, c));
}

static epmoe_status_t compare(const op_job_t *job, const op_output_t *output, case_result_t *result)
{
    int64_t n = output->cols, size = epmoe_dtype_size(output->dtype);
    double *out = NULL, *ref = NULL;
    epmoe_status_t status = epmoei_alloc_for((void **)&out, n * 8, "a row");
    if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&ref, n * 8, "a row");
    for (int64_t r = 0; r < output->rows && status == EPMOE_OK; r++) {
        const char *out_row = (const char *)output->out->host + r * n * size;
        const char *ref_row = (const char *)output->ref + r * n * size;
        if (!computed_by_reference(job, r)) continue;
        for (int64_t c = 0; c < n && output->dtype == EPMOE_I32; c++)
            result->wrong += memcmp(out_row + c * 4, ref_row + c * 4, 4) != 0;
        if (output->dtype == EPMOE_I32) continue;
        for (int64_t c = 0; c < n; c++) {
            out[c] = value_at(out_row, output->dtype, c);
            ref[c] = value_at(ref_row, output->dtype, c);
        }
        /* A code may be the next one where the value that it stands for lies between two. */
        double tolerance = output->dtype == EPMOE_F8_E4M3 ? 0.13 : stats_tolerance(output->dtype);
        result->wrong += stats_count_wrong(out, ref, n, tolerance, &result->max_rel_err);
        result->checked_rows++;
    }
    epmoei_free(ref);
    epmoei_free(out);
    return status;
}

static epmoe_status_t check_job(op_job_t *job, const op_chain_t *chain, case_result_t *result)
{
    int64_t differ = 0;
    EPMOEI_CHECK(op_chain_compare(chain, &differ));
    if (differ)
        fprintf(stderr, "%s: %s: the last call of the chain has other outputs than the first\n",
                job->bench->program->name, job->kind->name);
    result->wrong += differ;
    if (job->kind->judge) {
        result->wrong += job->kind->judge(job, &result->max_rel_err);
    } else {
        EPMOEI_CHECK(job->kind->run_reference(job));
        for (int32_t i = 0; i < job->num_outputs; i++) EPMOEI_CHECK(compare(job, &job->outputs[i], result));
    }
    for (int32_t i = 0; i < job->num_outputs; i++) {
        if (!buffer_guards_changed(job->outputs[i].out)) continue;
        fprintf(stderr, "%s: memory outside output %d was written\n", job->bench->program->name, i);
        result->wrong++;
    }
    result->checked = true;
    return EPMOE_OK;
}

static void rate_job(const op_job_t *job, case_result_t *result)
{
    const ceilings_t *ceilings = &job->bench->ceilings;
    double seconds = result->us_median * 1e-6;
    double memory = job->floor.bytes / ceilings->read_bytes_per_s, compute = job->floor.flops / ceilings->flops_per_s;
    result->floor_us = 1e6 * (memory > compute ? memory : compute);
    result->floor_fraction = seconds > 0 ? result->floor_us / result->us_median : 0;
    bool copies = memory >= compute && ceilings->copy_bytes_per_s > 0 && seconds > 0;
    result->copy_fraction = copies ? job->floor.bytes / ceilings->copy_bytes_per_s / seconds : NAN;
    result->tokens_per_s = seconds > 0 ? job->num_tokens / seconds : 0;
    result->tflops = seconds > 0 ? job->floor.flops / seconds * 1e-12 : 0;
    result->memory_gbps = seconds > 0 ? job->floor.bytes / seconds * 1e-9 : 0;
}

static epmoe_status_t run_case(const bench_t *bench, const char *op, int32_t index, int64_t *wrong)
{
    int32_t num_tokens = bench->options->tokens[index];
    epmoe_status_t status;
    op_job_t job;
    op_chain_t chain = {0};
    case_result_t result = {0};
    report_busy(bench, index, "making the op's data");
    EPMOEI_CHECK_GOTO(op_job_create(&job, bench, op, num_tokens), done);
    EPMOEI_CHECK_GOTO(op_chain_create(&chain, &job), done);
    report_busy(bench, index, "timing");
    EPMOEI_CHECK_GOTO(time_job(&job, &chain, &result), done);
    rate_job(&job, &result);
    if (bench->options->check) {
        report_busy(bench, index, "checking against the reference");
        EPMOEI_CHECK_GOTO(check_job(&job, &chain, &result), done);
    }
    *wrong += result.wrong;
    program_idle(bench->program);
    status = report_op(bench, op, num_tokens, &result);
done:
    op_chain_destroy(&chain);
    op_job_destroy(&job);
    return status;
}

epmoe_status_t op_run(const bench_t *bench, int64_t *wrong)
{
    const options_t *options = bench->options;
    report_op_header(bench);
    for (int32_t i = 0; i < options->num_ops * options->num_cases; i++)
        EPMOEI_CHECK(run_case(bench, options->ops[i / options->num_cases], i % options->num_cases, wrong));
    report_footer(bench, *wrong);
    return EPMOE_OK;
}
