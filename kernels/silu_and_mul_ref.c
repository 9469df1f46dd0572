#include "kernels/activation.h"
#include "kernels/silu_and_mul.h"

epmoe_status_t epmoei_silu_and_mul_ref(const epmoe_silu_and_mul_args_t *args, epmoe_stream_t stream)
{
    (void)stream;
    for (int64_t t = 0; t < args->num_tokens; t++)
        for (int64_t i = 0; i < args->width; i++) {
            float gate = epmoei_load(args->x, args->dtype, t * args->x_stride + i);
            float up = epmoei_load(args->x, args->dtype, t * args->x_stride + args->width + i);
            epmoei_store(args->y, args->dtype, t * args->y_stride + i,
                         epmoei_activate(args->activation, gate, up, args->alpha, args->limit));
        }
    return EPMOE_OK;
}
