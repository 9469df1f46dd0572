/* Weights into the layer: from a caller's arrays, a checkpoint, or the random generator. The first two are sources of
 * views (moe/checkpoint.h) that one builder copies, an expert at a time, into the packed layout. */
#ifndef EPMOEI_LAYER_WEIGHTS_H
#define EPMOEI_LAYER_WEIGHTS_H

#include "moe/layer.h"
#include "moe/quant_writer.h"

/* Where a build takes its views from. */
typedef struct epmoei_weights_source_t {
    epmoe_status_t (*layer)(const void *ctx, epmoei_layer_source_t *out);
    epmoe_status_t (*expert)(const void *ctx, int32_t local_expert, epmoei_expert_source_t *out);
    epmoe_status_t (*step)(void *ctx); /* after the common weights and after each expert; an error ends it; or NULL */
    void *ctx;
    const epmoe_load_options_t *options; /* or NULL */
    const char *place;                   /* which weights these are, for warnings */
} epmoei_weights_source_t;

/* Checks every view against the layer's config, then copies. borrow_matrices: the expert matrices are checked but
 * neither allocated nor copied. On failure the layer may have lost its old weights; has_weights says so. */
epmoe_status_t epmoei_layer_build_weights(epmoe_layer_t *layer, const epmoei_weights_source_t *source,
                                          bool borrow_matrices);
/* epmoe_layer_set_random_weights, which calls options->progress as a load does; NULL = none. */
epmoe_status_t epmoei_layer_random_weights(epmoe_layer_t *layer, uint64_t seed, const epmoe_load_options_t *options);
/* Replaces the layer's weights by uninitialised memory for these formats. */
epmoe_status_t epmoei_layer_make_weights(epmoe_layer_t *layer, const epmoei_layer_formats_t *formats);
/* On a device that streams them faster so, the layer's own matrices of 16 bits into tiles (kernels/plain_tiles.h), all
 * that can be. After an error some are part rows and part tiles. */
epmoe_status_t epmoei_layer_tile_weights(epmoe_layer_t *layer);
void epmoei_layer_drop_weights(epmoe_layer_t *layer);
/* Address of an element of a plain packed matrix; NULL stays NULL. */
char *epmoei_weight_element(void *base, epmoe_format_t format, int64_t index);

/* Where gate or up row 0 of an expert lies in its packed [2f,d], and the rows to the next: on the CPU all gate rows
 * come first; on CUDA they alternate, so that one thread's accumulators hold both. */
void epmoei_packed_rows(const epmoe_layer_t *layer, int64_t f, bool up, int64_t *first_row, int64_t *row_step);

#endif
