/* Which kernels of a device run an attention call, and how they cut it: a pure function of the sizes. */
#ifndef EPMOEI_ATTENTION_PLAN_H
#define EPMOEI_ATTENTION_PLAN_H

#include "dense_layers/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the tiles of a kernel lie over the tokens. */
typedef enum epmoei_attention_tiles_t {
    EPMOEI_TILES_OF_TOKENS = 0,  /* tile i is token i */
    EPMOEI_TILES_OF_QUERIES = 1, /* sequence b owns the tiles from query_start[b] / queries + b on, as many as it needs
                                    or more */
    EPMOEI_TILES_OF_SEQUENCES = 2, /* tile i is sequence i, if all of its queries fit */
} epmoei_attention_tiles_t;

/* A tile is up to `queries` tokens of one sequence times up to `heads` query heads of one cache head. */
typedef struct epmoei_attention_tiling_t {
    epmoei_attention_tiles_t kind;
    int32_t heads;
    int32_t queries;
    int32_t head_units; /* tiles side by side: of all cache heads */
    int64_t tiles;      /* over the tokens */
} epmoei_attention_tiling_t;

typedef enum epmoei_attention_way_t {
    EPMOEI_ATTENTION_ANY = 0,    /* any layout, dtype and size, without tensor cores */
    EPMOEI_ATTENTION_ROWS = 1,   /* keys and values of up to 256 columns in rows */
    EPMOEI_ATTENTION_LATENT = 2, /* MLA: keys of up to 576 columns, whose first 512 at most are the values */
} epmoei_attention_way_t;

enum { EPMOEI_DECODE_ROWS = 16, EPMOEI_PREFILL_ROWS = 64, EPMOEI_PREFILL_SM90_ROWS = 128 };
/* The keys of a part are a multiple of the first, and at least the second. */
enum { EPMOEI_PART_KEYS = 64, EPMOEI_LEAST_PART_KEYS = 256 };

typedef struct epmoei_attention_plan_t {
    epmoei_attention_way_t way;
    /* With both a sequence of at most few_queries new tokens belongs to decode, any other to prefill. LATENT has decode
     * alone. */
    bool decode;
    bool prefill;
    bool prefill_sm90;
    int32_t few_queries;
    int32_t columns; /* of keys and values in the kernel that is compiled: rounded up */
    epmoei_attention_tiling_t decode_tiling;
    epmoei_attention_tiling_t prefill_tiling;
    int32_t parts; /* that decode cuts a context into, at most */
    int64_t workspace_bytes;
} epmoei_attention_plan_t;

/* `args` checked. tier 80 or 90; parts are limited by what fits into workspace_bytes. */
epmoei_attention_plan_t epmoei_attention_plan(const epmoe_attention_args_t *args, int32_t tier, int32_t num_sms,
                                              int64_t workspace_bytes);

/* No call with values of these columns makes use of more. */
int64_t epmoei_attention_most_workspace(int32_t value_dim, int32_t num_sms);

#ifdef __cplusplus
}
#endif

#endif
