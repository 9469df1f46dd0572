/* The attention heads of the models that --model knows: what the dense ops of a decoder layer work on. */
#ifndef EPMOE_BENCH_HEADS_H
#define EPMOE_BENCH_HEADS_H

#include "bench/bench.h"

typedef struct heads_t {
    const char *model; /* as epmoe_preset_name has it */
    int32_t heads;     /* of q */
    int32_t kv_heads;
    int32_t head_dim;   /* MLA: of the rotary part, the only one that RoPE touches */
    int32_t rotary_dim; /* columns of a head that turn */
    int32_t cache_dim;  /* columns per head in the KV cache; MLA: latent and rotary part */
} heads_t;

/* The model's, or those of --heads, all of whose columns turn. NOT_SUPPORTED for a model without known heads. */
epmoe_status_t heads_of_bench(const bench_t *bench, heads_t *heads);

#endif
