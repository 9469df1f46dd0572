/* What moe_layer_bench prints, on rank 0 alone. */
#ifndef EPMOE_BENCH_REPORT_H
#define EPMOE_BENCH_REPORT_H

#include "bench/bench.h"

void report_models(void);
/* The table's head; nothing in JSON but the warnings, which then go to stderr. */
void report_header(const bench_t *bench);
/* One line per case. OUT_OF_MEMORY when JSON cannot be built. */
epmoe_status_t report_case(const bench_t *bench, const bench_case_t *made, const case_result_t *result);
/* The same for --op. */
void report_op_header(const bench_t *bench);
epmoe_status_t report_op(const bench_t *bench, const char *op, int32_t num_tokens, const case_result_t *result);
/* report_json.c: one object on one line. */
epmoe_status_t report_json_case(const bench_t *bench, const bench_case_t *made, const case_result_t *result, FILE *to);
epmoe_status_t report_json_op(const bench_t *bench, const char *op, int32_t num_tokens, const case_result_t *result);
void report_footer(const bench_t *bench, int64_t wrong);

/* program_busy with something long in case `index`. */
void report_busy(const bench_t *bench, int32_t index, const char *what);

#endif
