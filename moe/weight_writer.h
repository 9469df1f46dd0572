/* Puts views of weights into packed memory of either backend. For CUDA a source in host memory goes through one device
 * staging buffer, as large as the largest matrix so far, so that the peak of a load is the packed weights plus one
 * matrix of one expert. */
#ifndef EPMOEI_WEIGHT_WRITER_H
#define EPMOEI_WEIGHT_WRITER_H

#include "base/device.h"
#include "kernels/repack.h"

typedef struct epmoei_weight_writer_t {
    epmoe_backend_t backend;
    epmoe_stream_t stream;
    void *staging;
    int64_t staging_bytes;
} epmoei_weight_writer_t;

epmoe_status_t epmoei_writer_open(epmoei_weight_writer_t *writer, epmoe_backend_t backend);
/* Enqueues; the source must stay as it is until epmoei_writer_wait. */
epmoe_status_t epmoei_writer_put(epmoei_weight_writer_t *writer, const epmoei_view_t *view, void *dst,
                                 epmoe_dtype_t dst_dtype, int64_t first_row, int64_t row_step);
epmoe_status_t epmoei_writer_wait(epmoei_weight_writer_t *writer);
void epmoei_writer_close(epmoei_weight_writer_t *writer);

#endif
