/* The attention half of a decoder layer: norm, projections, RoPE, cache, attention, residual, second norm. Its two
 * kinds are self_attention_gqa.c and self_attention_mla.c.
 *
 *   GQA  qkv = x w_qkv^T; q and k heads normalised (qk_norm) and rotated; k, v to the cache; attention; out
 *   MLA  c, r = x w_kv_down^T, c normalised, r rotated: the row (c, r) is the token's key, and c its value. A head's
 *        k = w_key_up[h] c and v = w_value_up[h] c are never made: q_nope . k = (w_key_up[h]^T q_nope) . c, so q goes
 * to the latent before the attention, and w_value_up is applied to what comes out of it.
 */
#ifndef EPMOEI_SELF_ATTENTION_H
#define EPMOEI_SELF_ATTENTION_H

#include "dense_layers/linear.h"
#include "dense_layers/paged_batch.h"

typedef struct epmoei_attention_shape_t {
    epmoe_decoder_config_t config; /* every default filled in */
    epmoe_backend_t backend;
    int32_t hidden; /* d */
    int32_t max_tokens;
    epmoe_dtype_t dtype;
} epmoei_attention_shape_t;

/* All matrices in one format. Norms, biases and sinks are fp32; NULL = none. */
typedef struct epmoei_attention_weights_t {
    float *input_norm; /* [d] */
    float *post_norm;  /* [d] */
    epmoei_linear_t out;
    float *sinks; /* [H] */
    /* GQA */
    epmoei_linear_t qkv;    /* [(H+2Hk)*D,d] */
    float *q_norm, *k_norm; /* see epmoei_qk_norm_columns; ones without a weight */
    /* MLA; q_nope and q_rope read q's latent, or x without one */
    epmoei_linear_t q_down;         /* [q_latent,d] */
    float *q_down_norm;             /* [q_latent] */
    epmoei_linear_t q_nope, q_rope; /* [H*nope_dim,..], [H*rope_dim,..] */
    epmoei_linear_t kv_down;        /* [kv_latent+rope_dim,d] */
    float *kv_down_norm;            /* [kv_latent] */
    epmoei_linear_t key_up;         /* per head [kv_latent,nope_dim]: transposed */
    epmoei_linear_t value_up;       /* per head [value_dim,kv_latent] */
} epmoei_attention_weights_t;

typedef struct epmoei_attention_workspace_t {
    void *residual;                                          /* [T,d]: h */
    void *rows;                                              /* [T,d]: what the two norms make, and what `out` gives */
    void *heads;                                             /* [T,H,D] or [T,H,value_dim]: what `out` reads */
    void *qkv;                                               /* GQA */
    void *q_latent, *q_nope, *key, *absorbed, *q, *o_latent; /* MLA */
    float *latents;        /* MLA, in fp32 until normalised and rotated: [T,q_latent], then [T,kv_latent+rope_dim] */
    float *q_rope;         /* MLA, the same: [T,H,rope_dim] */
    int64_t *positions;    /* [T] */
    int64_t *slots;        /* [T] */
    int32_t *head_offsets; /* MLA: [H+1] */
    int32_t *head_rows;    /* MLA: [H*T] */
    void *gemm;
    int64_t gemm_bytes;
    void *parts; /* CUDA: of the attention */
    int64_t parts_bytes;
    int64_t bytes;
} epmoei_attention_workspace_t;

/* One forward. */
typedef struct epmoei_attention_run_t {
    const epmoei_attention_shape_t *shape;
    const epmoei_attention_weights_t *weights;
    const epmoei_attention_workspace_t *workspace;
    const float *cos_sin; /* [config.rope.num_positions, config.rope.rotary_dim] */
    const epmoei_paged_batch_t *batch;
    epmoe_stream_t stream;
} epmoei_attention_run_t;

/* Checks the config and fills its defaults in. */
epmoe_status_t epmoei_attention_shape_check(const epmoe_decoder_config_t *config, int32_t hidden, int32_t max_tokens,
                                            epmoe_dtype_t dtype, epmoe_backend_t backend,
                                            epmoei_attention_shape_t *shape);
/* Columns of a token's row in the key cache, all heads. */
int64_t epmoei_attention_key_columns(const epmoe_decoder_config_t *config);

/* Columns of the weights of q's and k's norms; 0 without such a norm. */
typedef struct epmoei_qk_norm_columns_t {
    int64_t q, k;
} epmoei_qk_norm_columns_t;
epmoei_qk_norm_columns_t epmoei_qk_norm_columns(const epmoe_decoder_config_t *config);

/* Both carve; base NULL counts. */
int64_t epmoei_attention_weights_layout(char *base, const epmoei_attention_shape_t *shape, epmoe_format_t format,
                                        epmoei_attention_weights_t *out);
epmoe_status_t epmoei_attention_workspace_layout(char *base, const epmoei_attention_shape_t *shape,
                                                 epmoei_attention_workspace_t *out);

/* workspace->residual = x + attention(norm(x)); workspace->rows = norm(residual). The batch has been filled. */
epmoe_status_t epmoei_self_attention(const epmoei_attention_run_t *run, const void *x);

/* workspace->rows, normalised, to workspace->heads. */
epmoe_status_t epmoei_self_attention_gqa(const epmoei_attention_run_t *run);
epmoe_status_t epmoei_self_attention_mla(const epmoei_attention_run_t *run);

/* What both kinds do alike. */
epmoei_linear_run_t epmoei_attention_linear_run(const epmoei_attention_run_t *run);
/* x and residual of `dtype`, y of the layer's. */
epmoe_status_t epmoei_attention_norm(const epmoei_attention_run_t *run, epmoe_dtype_t dtype, const void *x,
                                     int64_t stride, int32_t columns, const float *weight, float eps, void *residual,
                                     void *y);
/* The new keys and values of key_columns columns to the cache; value NULL with MLA. */
epmoe_cache_write_args_t epmoei_attention_cache_args(const epmoei_attention_run_t *run, const void *key,
                                                     const void *value, int64_t stride);
/* To o [T,H,value columns]; q [T,H,D]. */
epmoe_status_t epmoei_attention_heads(const epmoei_attention_run_t *run, const void *q, int64_t q_stride, void *o);

#endif
