#include "dense_layers/linear_op.h"

epmoe_status_t epmoei_linear_cpu(const epmoe_linear_args_t *args, epmoe_stream_t stream)
{
    epmoei_linear_space_t space;
    EPMOEI_CHECK(epmoei_linear_place(args, EPMOE_BACKEND_CPU, &space));
    if (epmoei_linear_makes_codes(args)) EPMOEI_CHECK(epmoei_linear_quantize(args, EPMOE_BACKEND_CPU, &space, stream));
    epmoe_grouped_gemm_args_t gemm = epmoei_linear_gemm_args(args, EPMOE_BACKEND_CPU, &space);
    return epmoe_grouped_gemm(&gemm, stream);
}
