#include "bench/op.h"

#include "bench/op_job.h"
#include "bench/report.h"
#include "bench/stats.h"

#include "base/dtype.h"

#include <math.h>
#include <string.h>

static epmoe_status_t time_job(op_job_t *job, case_result_t *result)
{
    const options_t *options = job->bench->options;
    epmoe_status_t status;
    double *times = NULL;
    EPMOEI_CHECK_GOTO(epmoei_alloc_for((void **)&times, (int64_t)options->iters * 8, "times"), done);
    for (int32_t i = -options->warmup; i < options->iters; i++) {
        ceilings_flush(&job->bench->ceilings);
        double start = epmoei_now_seconds();
        EPMOEI_CHECK_GOTO(job->run(job), done);
        if (i >= 0) times[i] = 1e6 * (epmoei_now_seconds() - start);
    }
    result->us_median = stats_median(times, options->iters);
    result->us_min = times[0];
    result->us_max = times[options->iters - 1];
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

static epmoe_status_t check_job(op_job_t *job, case_result_t *result)
{
    EPMOEI_CHECK(job->run_reference(job));
    for (int32_t i = 0; i < job->num_outputs; i++) {
        const op_output_t *output = &job->outputs[i];
        int64_t n = output->cols, size = epmoe_dtype_size(output->dtype);
        double *out = NULL, *ref = NULL;
        epmoe_status_t status = epmoei_alloc_for((void **)&out, n * 8, "a row");
        if (status == EPMOE_OK) status = epmoei_alloc_for((void **)&ref, n * 8, "a row");
        for (int64_t r = 0; r < output->rows && status == EPMOE_OK; r++) {
            const char *out_row = (const char *)output->out + r * n * size;
            const char *ref_row = (const char *)output->ref + r * n * size;
            if (!computed_by_reference(job, r)) continue;
            for (int64_t c = 0; c < n && output->dtype == EPMOE_I32; c++)
                result->wrong += memcmp(out_row + c * 4, ref_row + c * 4, 4) != 0;
            if (output->dtype == EPMOE_I32) continue;
            for (int64_t c = 0; c < n; c++) {
                out[c] = (double)epmoei_load(out_row, output->dtype, c);
                ref[c] = (double)epmoei_load(ref_row, output->dtype, c);
            }
            result->wrong += stats_count_wrong(out, ref, n, stats_tolerance(output->dtype), &result->max_rel_err);
            result->checked_rows++;
        }
        epmoei_free(ref);
        epmoei_free(out);
        EPMOEI_CHECK(status);
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
    result->tokens_per_s = seconds > 0 ? job->num_tokens / seconds : 0;
    result->tflops = seconds > 0 ? job->floor.flops / seconds * 1e-12 : 0;
    result->memory_gbps = seconds > 0 ? job->floor.bytes / seconds * 1e-9 : 0;
}

static epmoe_status_t run_case(const bench_t *bench, int32_t num_tokens, int64_t *wrong)
{
    epmoe_status_t status;
    op_job_t job;
    case_result_t result = {0};
    report_busy(bench, "making the op's data");
    EPMOEI_CHECK_GOTO(op_job_create(&job, bench, num_tokens), done);
    report_busy(bench, "timing");
    EPMOEI_CHECK_GOTO(time_job(&job, &result), done);
    rate_job(&job, &result);
    if (bench->options->check) {
        report_busy(bench, "checking against the reference");
        EPMOEI_CHECK_GOTO(check_job(&job, &result), done);
    }
    *wrong += result.wrong;
    report_idle(bench);
    status = report_op(bench, num_tokens, &result);
done:
    op_job_destroy(&job);
    return status;
}

epmoe_status_t op_run(const bench_t *bench, int64_t *wrong)
{
    report_op_header(bench);
    for (int32_t i = 0; i < bench->options->num_cases; i++)
        EPMOEI_CHECK(run_case(bench, bench->options->tokens[i], wrong));
    report_footer(bench, *wrong);
    return EPMOE_OK;
}
