/* Argument checks that the dense ops share, and access to indices of two widths. */
#ifndef EPMOEI_DENSE_CHECK_H
#define EPMOEI_DENSE_CHECK_H

#include "kernels/op_check.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 0 becomes 1e-6; negative and not finite ones fail. */
epmoe_status_t epmoei_check_eps(float *eps);
/* 0 becomes head_dim; odd ones and those above it fail. */
epmoe_status_t epmoei_check_rotary_dim(int32_t *rotary_dim, int32_t head_dim);
/* 0 becomes I64; others than I32 and I64 fail. */
epmoe_status_t epmoei_check_index_dtype(const char *name, epmoe_dtype_t *dtype);
/* Host memory only: every index lies in lo..hi. */
epmoe_status_t epmoei_check_indices(const char *name, const void *data, epmoe_dtype_t dtype, int64_t count, int64_t lo,
                                    int64_t hi);
/* Host memory only: NULL, or a finite scale above 0. */
epmoe_status_t epmoei_check_scale(const char *name, const float *scale);

/* Element i of an array of I32 or I64 at any address. */
static inline int64_t epmoei_index(const void *data, epmoe_dtype_t dtype, int64_t i)
{
    int64_t wide;
    int32_t narrow;
    if (dtype == EPMOE_I64) {
        memcpy(&wide, (const char *)data + 8 * i, 8);
        return wide;
    }
    memcpy(&narrow, (const char *)data + 4 * i, 4);
    return narrow;
}

#ifdef __cplusplus
}
#endif

#endif
