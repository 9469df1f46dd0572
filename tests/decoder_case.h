/* A decoder layer of a golden checkpoint with its recorded input and output, and forwards over a shuffled block table.
 */
#ifndef EPMOE_DECODER_CASE_H
#define EPMOE_DECODER_CASE_H

#include "moe/checkpoint.h"

enum { kDecoderTokens = 24, kDecoderBlock = 4, kDecoderMaxBlocks = 8, kDecoderSeqs = 2 };

typedef struct decoder_case_t {
    epmoe_checkpoint_t *checkpoint;
    epmoei_safetensors_t *golden;
    epmoe_decoder_config_t config;
    epmoe_layer_config_t mlp;
    epmoe_decoder_t *decoder;
    int32_t hidden;
    int32_t block_table[kDecoderSeqs * kDecoderMaxBlocks];
    float *in;   /* [24,d] */
    double *out; /* [24,d] */
} decoder_case_t;

/* Opens tests/data/golden/NAME and reads its layer; the case's configs may be changed before decoder_case_make. */
decoder_case_t decoder_case_open(const char *name, int32_t layer);
/* Makes the decoder with a cache of its own and loads it. comm NULL = one rank. */
void decoder_case_make(decoder_case_t *c, int32_t layer, epmoe_dtype_t dtype, epmoe_comm_t *comm);
void decoder_case_close(decoder_case_t *c);
/* Arguments for tokens [first,last) of sequence 0; they point into `c` and static memory. */
epmoe_decoder_forward_args_t decoder_case_args(decoder_case_t *c, int32_t first, int32_t last, const void *x, void *y);
/* layers.I.NAME or NAME of the golden file, converted; the caller's to free. */
float *decoder_case_recorded(const decoder_case_t *c, const char *name, int64_t elements);

#endif
