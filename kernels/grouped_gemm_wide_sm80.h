/* The sm80 tier's product for many rows per expert; kernels/grouped_gemm_sm80.cu decides when. */
#ifndef EPMOEI_GROUPED_GEMM_WIDE_SM80_H
#define EPMOEI_GROUPED_GEMM_WIDE_SM80_H

#include "base/device.h"
#include "kernels/grouped_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the device has the shared memory for it and the offsets are within the kernel's. */
bool epmoei_grouped_gemm_wide_fits_sm80(const epmoe_grouped_gemm_args_t *args, const epmoei_device_info_t *device);
/* After epmoei_grouped_gemm_check_cuda, where it fits. */
epmoe_status_t epmoei_grouped_gemm_wide_sm80(const epmoe_grouped_gemm_args_t *args, epmoe_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
