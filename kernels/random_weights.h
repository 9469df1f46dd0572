/* Random weights of a layer as a pure function of (seed, tensor, expert, element): the same on every rank count and
 * backend. Element values are bell-shaped (a sum of four uniforms) with standard deviation `scale`, computed in
 * integers and one fp32 multiplication, so that a GPU gets equal bits. */
#ifndef EPMOEI_RANDOM_WEIGHTS_H
#define EPMOEI_RANDOM_WEIGHTS_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum epmoei_random_tensor_t {
    EPMOEI_RANDOM_ROUTER = 0,         /* [E,d], scale 1/sqrt(d) */
    EPMOEI_RANDOM_ROUTER_BIAS = 1,    /* [E], scale 0.1 */
    EPMOEI_RANDOM_SELECTION_BIAS = 2, /* [E], scale 0.02 */
    EPMOEI_RANDOM_GATE = 3,           /* [f,d] of one expert, scale 1/sqrt(d) */
    EPMOEI_RANDOM_UP = 4,             /* [f,d] */
    EPMOEI_RANDOM_DOWN = 5,           /* [d,f], scale 1/sqrt(f) */
    EPMOEI_RANDOM_GATE_BIAS = 6,      /* [f], scale 0.1 */
    EPMOEI_RANDOM_UP_BIAS = 7,
    EPMOEI_RANDOM_DOWN_BIAS = 8,
    EPMOEI_RANDOM_SHARED_GATE_PROJ = 9, /* [fs,d] */
    EPMOEI_RANDOM_SHARED_UP = 10,
    EPMOEI_RANDOM_SHARED_DOWN = 11,
    EPMOEI_RANDOM_SHARED_GATE = 12, /* [d]: the sigmoid gate */
    EPMOEI_RANDOM_ATTENTION = 13,   /* of a decoder layer; `expert` says which, see moe/decoder_random.c */
} epmoei_random_tensor_t;

/* The scale of each tensor above; `columns` is its K (biases ignore it). */
float epmoei_random_scale(epmoei_random_tensor_t tensor, int64_t columns);

/* Elements [first, first+count) of the tensor to dst[0..count), rounded to dtype (F32, BF16, F16). `expert` is the
 * global id, 0 for tensors that are not an expert's. */
void epmoei_random_fill(void *dst, epmoe_dtype_t dtype, uint64_t seed, epmoei_random_tensor_t tensor, int32_t expert,
                        int64_t first, int64_t count, float scale);
/* The whole tensor [rows,cols] into rows first_row, first_row + row_step, ... of dst, in device memory: equal bits. */
epmoe_status_t epmoei_random_fill_sm80(void *dst, epmoe_dtype_t dtype, uint64_t seed, epmoei_random_tensor_t tensor,
                                       int32_t expert, int64_t rows, int64_t cols, int64_t first_row, int64_t row_step,
                                       float scale, epmoe_stream_t stream);

/* What a generator needs: element i is round(epmoei_bell(i, key) * unit). */
uint64_t epmoei_random_key(uint64_t seed, epmoei_random_tensor_t tensor, int32_t expert);
float epmoei_random_unit(float scale);

#ifdef __cplusplus
}
#endif

#endif
