/* A layer's routing at once: router product, top-k and, unless tokens and experts are very many, the align of one rank.
 * Only on CUDA, where it is two to four launches; the semantics are those of the ops it replaces.
 *
 * Contract of the kernel:
 *   logits      those of router_gemm.h, fp32; topk.logits, when given, takes their place for the choice
 *   ids         and weights: as epmoe_topk makes them of those logits
 *   joined      rows of k+1 slots, where they are wanted: ids and weights, and behind them expert E, which every token
 *               takes, with weight 1
 *   align       as epmoe_align_block_size makes of ids with block_size 1 and no expert_map; with joined slots, of these
 *               and E+1 experts
 *   edges       any T, E 1..4096, k 1..min(E,32), with joined slots 1..min(E,31), d a multiple of 8; T = 0 is a
 *               no-op: nothing is written
 *   alignment   x, weight, bias, logits, topk.logits and topk.selection_bias 16 bytes, the rest 4
 *   aliasing    none
 *   padding     rows from *num_tokens_dev on are neither read nor written, nor places; sorted_ids from the actual T*k
 *               on T*k (T*(k+1) with joined slots)
 *   NaN         as in topk.h
 */
#ifndef EPMOEI_ROUTE_H
#define EPMOEI_ROUTE_H

#include "kernels/kernel_table.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct epmoei_route_args_t {
    size_t struct_size;
    epmoe_backend_t backend;
    int32_t hidden;           /* d */
    epmoe_dtype_t dtype;      /* of x and weight: BF16 or F16 */
    const void *x;            /* [T,d] */
    const void *weight;       /* [E,d] */
    const float *bias;        /* [E] or NULL: added to the logits */
    float *logits;            /* out [T,E] or NULL: the router's own */
    epmoe_topk_args_t topk;   /* T, E, k, rules, ids, weights and num_tokens_dev; logits NULL or [T,E] f32 */
    int32_t *joined_ids;      /* out [T,k+1] or NULL: with them there is one more slot and expert in what follows */
    float *joined_weights;    /* out [T,k+1], with joined_ids */
    int32_t *sorted_ids;      /* out [T*k]; NULL = no align */
    int32_t *num_post_padded; /* out [1], with sorted_ids */
    int32_t *expert_offsets;  /* out [E+1], with sorted_ids */
    int32_t *places;          /* out [T*k] or NULL, with sorted_ids: where each slot stands in them */
    void *workspace;          /* epmoei_route_workspace bytes */
    int64_t workspace_bytes;
} epmoei_route_args_t;

enum { EPMOEI_ROUTE_ALIGN_EXPERTS = 512 };

/* Whether a call of these sizes does the align too; otherwise it leaves those outputs alone. num_experts: those to
 * choose from; slots: of a token. Never of more than 2^21 tokens. */
bool epmoei_route_aligns(int32_t num_tokens, int32_t num_experts, int32_t slots);
/* Does not fall with num_tokens, so that the workspace of many tokens does for fewer. */
int64_t epmoei_route_workspace(int32_t num_tokens, int32_t num_experts, int32_t hidden);
/* Checks, then enqueues. NOT_SUPPORTED on a backend without it. */
epmoe_status_t epmoei_route(const epmoei_route_args_t *args, epmoe_stream_t stream);

/* How tokens are cut for the align: groups of 1 << shift, and counts[count,stride], two experts a word. */
typedef struct epmoei_route_groups_t {
    int32_t count;
    int32_t shift;  /* 5 at least */
    int32_t stride; /* words: a multiple of 4, so that rows are whole vectors */
} epmoei_route_groups_t;
epmoei_route_groups_t epmoei_route_groups(int32_t num_tokens, int32_t num_experts);
/* What the workspace begins with; a multiple of EPMOEI_ALIGNMENT. */
int64_t epmoei_route_counts_bytes(int32_t num_experts);

/* Most tokens whose partial logits lie in the workspace at a time. */
int32_t epmoei_route_chunk(int32_t num_tokens, int32_t num_experts, int32_t hidden);

epmoe_status_t epmoei_route_sm80(const epmoei_route_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
