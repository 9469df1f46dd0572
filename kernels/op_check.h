/* Argument checks that the ops share. Each failure names the argument, its value and what was expected. */
#ifndef EPMOEI_OP_CHECK_H
#define EPMOEI_OP_CHECK_H

#include "base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* lo <= value <= hi; hi INT32_MAX means that only lo limits. */
epmoe_status_t epmoei_check_range(const char *name, int64_t value, int64_t lo, int64_t hi);
epmoe_status_t epmoei_check_pointer(const char *name, const void *pointer);
/* bytes a power of two; NULL is aligned. */
epmoe_status_t epmoei_check_aligned(const char *name, const void *pointer, int32_t bytes);
/* F32, BF16 or F16. */
epmoe_status_t epmoei_check_float_dtype(const char *name, epmoe_dtype_t dtype);
/* The elements of a [rows,cols,depth] tensor, in 8-byte units, must be countable in int64. */
epmoe_status_t epmoei_check_volume(const char *name, int64_t rows, int64_t cols, int64_t depth);
/* Replaces 0 by `least`, the row width; smaller ones and those whose offsets overflow fail. */
epmoe_status_t epmoei_check_stride(const char *name, int64_t *stride, int64_t least, int32_t rows);
/* Host memory only: *actual = *num_tokens_dev, or num_tokens when that is NULL. */
epmoe_status_t epmoei_actual_tokens(const int32_t *num_tokens_dev, int32_t num_tokens, int32_t *actual);

#ifdef __cplusplus
}
#endif

#endif
