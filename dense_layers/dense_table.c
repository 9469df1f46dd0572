#include "dense_layers/dense_table.h"

#include "base/device.h"
#include "dense_layers/attention.h"
#include "dense_layers/cache_write.h"
#include "dense_layers/linear_op.h"
#include "dense_layers/qk_norm_rope.h"
#include "dense_layers/rms_norm.h"
#include "dense_layers/rope.h"
#include "dense_layers/rope_cache_write.h"
#include "dense_layers/sample.h"
#include "dense_layers/spec_verify.h"

static const epmoei_dense_table_t ref_table = {
    .rms_norm = epmoei_rms_norm_ref,
    .linear = epmoei_linear_ref,
    .rope = epmoei_rope_ref,
    .qk_norm_rope = epmoei_qk_norm_rope_ref,
    .cache_write = epmoei_cache_write_ref,
    .rope_cache_write = epmoei_rope_cache_write_ref,
    .attention = epmoei_attention_ref,
    .sample = epmoei_sample_ref,
    .spec_verify = epmoei_spec_verify_ref,
};

static const epmoei_dense_table_t cpu_table = {
    .rms_norm = epmoei_rms_norm_cpu,
    .linear = epmoei_linear_cpu,
    .rope = epmoei_rope_cpu,
    .qk_norm_rope = epmoei_qk_norm_rope_cpu,
    .cache_write = epmoei_cache_write_cpu,
    .rope_cache_write = epmoei_rope_cache_write_cpu,
    .attention = epmoei_attention_cpu,
    .sample = epmoei_sample_cpu,
    .spec_verify = epmoei_spec_verify_cpu,
};

#if EPMOE_HAVE_CUDA
static const epmoei_dense_table_t sm80_table = {
    .rms_norm = epmoei_rms_norm_sm80,
    .linear = epmoei_linear_sm80,
    .rope = epmoei_rope_sm80,
    .qk_norm_rope = epmoei_qk_norm_rope_sm80,
    .cache_write = epmoei_cache_write_sm80,
    .rope_cache_write = epmoei_rope_cache_write_sm80,
    .attention = epmoei_attention_sm80,
    .sample = epmoei_sample_sm80,
    .spec_verify = epmoei_spec_verify_sm80,
};
#endif

epmoe_status_t epmoei_dense_kernels(epmoe_backend_t backend, const epmoei_dense_table_t **table)
{
    epmoe_backend_t resolved;
    EPMOEI_CHECK(epmoe_backend_resolve(backend, &resolved));
    *table = epmoei_cpu_tier() == EPMOEI_CPU_REF ? &ref_table : &cpu_table;
#if EPMOE_HAVE_CUDA
    if (resolved == EPMOE_BACKEND_CUDA) {
        EPMOEI_CHECK(epmoei_error_word_check());
        *table = &sm80_table;
    }
#endif
    return EPMOE_OK;
}
