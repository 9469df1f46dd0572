#include "moe/weight_writer.h"

#include "base/dtype.h"

epmoe_status_t epmoei_writer_open(epmoei_weight_writer_t *writer, epmoe_backend_t backend)
{
    *writer = (epmoei_weight_writer_t){.backend = backend};
    return backend == EPMOE_BACKEND_CUDA ? epmoei_stream_create(&writer->stream) : EPMOE_OK;
}

static epmoe_status_t stage(epmoei_weight_writer_t *writer, epmoei_view_t *view)
{
    int64_t bytes = epmoei_view_span(view) * epmoe_dtype_size(view->dtype);
    if (bytes > writer->staging_bytes) {
        EPMOEI_CHECK(epmoei_writer_wait(writer));
        epmoei_memory_free(writer->backend, writer->staging);
        writer->staging_bytes = 0;
        EPMOEI_CHECK(epmoei_memory_alloc(writer->backend, &writer->staging, bytes, "staging a weight matrix"));
        writer->staging_bytes = bytes;
    }
    EPMOEI_CHECK(epmoei_memory_copy(writer->backend, writer->staging, view->data, bytes, writer->stream));
    view->data = writer->staging;
    return EPMOE_OK;
}

epmoe_status_t epmoei_writer_put(epmoei_weight_writer_t *writer, const epmoei_view_t *view, void *dst,
                                 epmoe_dtype_t dst_dtype, int64_t first_row, int64_t row_step)
{
    epmoei_repack_args_t args = {*view, dst, dst_dtype, first_row, row_step};
    if (!dst || !view->data || view->rows == 0 || view->cols == 0) return EPMOE_OK;
#if EPMOE_HAVE_CUDA
    if (writer->backend == EPMOE_BACKEND_CUDA) {
        if (!epmoei_memory_is_device(view->data)) EPMOEI_CHECK(stage(writer, &args.src));
        return epmoei_repack_sm80(&args, writer->stream);
    }
#else
    (void)stage, (void)writer;
#endif
    epmoei_repack_cpu(&args);
    return EPMOE_OK;
}

epmoe_status_t epmoei_writer_wait(epmoei_weight_writer_t *writer)
{
    return epmoei_stream_wait(writer->backend, writer->stream);
}

void epmoei_writer_close(epmoei_weight_writer_t *writer)
{
    epmoei_memory_free(writer->backend, writer->staging);
    epmoei_stream_destroy(writer->stream);
    *writer = (epmoei_weight_writer_t){0};
}
