/* What the GPU checks share: an op's call as scalars and fields, run by the public entry on the device and by the
 * reference on the host with the same inputs. Device buffers lie between guard bands; outputs start as poison on both
 * sides, so that what neither writes compares equal and what only one writes does not. */
#ifndef EPMOE_CHECK_H
#define EPMOE_CHECK_H

#include "base/device.h"
#include "tests/testing.h"

#include <stddef.h>

enum { CHECK_MAX_FIELDS = 20, CHECK_MAX_ARGS_BYTES = 512 };

typedef struct check_op_t {
    const char *name;
    size_t args_size;
    epmoe_status_t (*run)(const void *args, epmoe_stream_t stream); /* the public entry */
    epmoe_status_t (*reference)(const void *args);                  /* checks and runs _ref on host pointers */
} check_op_t;

typedef enum check_kind_t {
    CHECK_IN,
    CHECK_OUT,
    CHECK_INOUT,   /* an output that aliases an input */
    CHECK_SCRATCH, /* device only */
} check_kind_t;

/* One pointer of an args struct and what it points to. */
typedef struct check_field_t {
    const char *name;
    size_t offset; /* of the pointer in the struct */
    check_kind_t kind;
    epmoe_dtype_t dtype;
    int64_t rows;
    int64_t cols;
    int32_t alignment; /* of the base: a smaller one is refused */
    int64_t bytes;
    char *host;     /* what the device gets before a run: data, or poison for an output */
    char *expected; /* outputs: what the reference makes of it */
    char *got;      /* outputs: what the device made of it */
    char *device;
    const char *sent; /* what the device holds of it before the run: host, or what a check put in its place */
} check_field_t;

typedef struct check_case_t {
    const check_op_t *op;
    _Alignas(16) unsigned char args[CHECK_MAX_ARGS_BYTES]; /* struct_size and scalars; pointers come from the fields */
    check_field_t fields[CHECK_MAX_FIELDS];
    int32_t num_fields;
    size_t alias_offset; /* another pointer to the INOUT field; 0 = none */
    double tolerance;    /* of F32, on top of one ulp of a 16-bit dtype */
    /* Replaces the comparison of one field where it is not NULL and returns true; reports by itself. */
    bool (*compare)(struct check_case_t *c, const check_field_t *field);
    char label[256];
} check_case_t;

extern epmoe_stream_t check_stream;

/* --small: little work, few cases of many, few repeats, so that a run under compute-sanitizer takes seconds. */
extern bool check_small;
/* Step through numbered variants, whose factors it has no divisor in common with: 1 but for --small. */
static inline int32_t check_step(int32_t step) { return check_small ? step : 1; }
/* Whether a case of so many elements is too much for --small. */
static inline bool check_skips(int64_t elements) { return check_small && elements > 1 << 17; }

/* One line of output: everything between is counted into it. */
void check_begin(const char *entry, const char *group);
void check_end(void);
/* Reports a failure of the current group, with the case's label in front when there is one. */
void check_fail(const check_case_t *c, const char *format, ...) EPMOEI_PRINTF(2, 3);
/* 0, or 1 after any failure. */
int check_exit_code(void);

/* Zeroes the case; args then hold struct_size alone. Backend offset is that of every args struct. */
void check_case(check_case_t *c, const check_op_t *op, const char *label_format, ...) EPMOEI_PRINTF(3, 4);
/* Adds a field and returns its host data, poison until the caller fills it (inputs). Empty fields stay NULL. */
void *check_add(check_case_t *c, const char *name, size_t offset, check_kind_t kind, epmoe_dtype_t dtype, int64_t rows,
                int64_t cols, int32_t alignment);
#define CHECK_ADD(c, type, member, kind, dtype, rows, cols, alignment)                                                 \
    check_add(c, #member, offsetof(type, member), kind, dtype, rows, cols, alignment)
check_field_t *check_find(check_case_t *c, const char *name);
void check_free(check_case_t *c);
/* testing_fill_normal for large arrays: the values repeat with a period that is a large prime. */
void check_fill_normal(testing_rng_t *rng, void *data, epmoe_dtype_t dtype, int64_t n, float scale);

/* Steps of a check, for those that need something in between. Each returns false after it has reported a failure. */
bool check_expect(check_case_t *c);                      /* runs the reference */
void check_upload(check_case_t *c);                      /* host to device, all fields */
void check_send(check_field_t *field, const char *data); /* another testing_buffer in place of host */
epmoe_status_t check_launch(check_case_t *c);            /* the public entry on the device pointers */
bool check_download(check_case_t *c); /* waits, fetches outputs; guards intact and inputs unchanged */
bool check_outputs(check_case_t *c);  /* got against expected */
/* A `compare` for what rounds nowhere differently: the same bits, but any NaN for a NaN. */
bool check_compare_bits(check_case_t *c, const check_field_t *field);

/* All of it, then repeated, bit for bit; in the repeats only outputs are fetched, but for the last. */
bool check_run(check_case_t *c);
/* Captures one call, then replays it on inputs that refill(c, round, ctx) changes in the host data. */
void check_graph(check_case_t *c, void (*refill)(check_case_t *c, int32_t round, void *ctx), void *ctx);
/* Every field's base moved off its alignment in turn: refused by name, nothing written. */
void check_misaligned(check_case_t *c);
/* The device data of field `name` replaced by `data` for one run that succeeds; the next call must report `count` bad
 * ids, and the one after it succeed. */
void check_bad_ids(check_case_t *c, const char *name, const void *data, int32_t count);

void check_topk(testing_rng_t *rng);
void check_align(testing_rng_t *rng);
void check_permute(testing_rng_t *rng);
void check_unpermute(testing_rng_t *rng);
void check_silu_and_mul(testing_rng_t *rng);
void check_sum(testing_rng_t *rng);
void check_grouped_gemm(testing_rng_t *rng);
void check_gemm_w4(testing_rng_t *rng);
void check_gemm_fp8(testing_rng_t *rng);
void check_experts_few(testing_rng_t *rng);
void check_route(testing_rng_t *rng);
void check_dequant(testing_rng_t *rng);
void check_pack_tiles(testing_rng_t *rng);
void check_quantize_fp8(testing_rng_t *rng);
void check_gemm_quant(testing_rng_t *rng);
void check_few_quant(testing_rng_t *rng);
void check_rms_norm(testing_rng_t *rng);
void check_linear(testing_rng_t *rng);
void check_rope(testing_rng_t *rng);
void check_qk_norm_rope(testing_rng_t *rng);
void check_cache_write(testing_rng_t *rng);
void check_attention(testing_rng_t *rng);
void check_sample(testing_rng_t *rng);
void check_spec_verify(testing_rng_t *rng);
void check_large(testing_rng_t *rng);

#endif
