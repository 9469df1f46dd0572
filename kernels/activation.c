#include "kernels/activation.h"

epmoe_status_t epmoei_activation_check(epmoe_activation_t activation, bool allow_ungated, float *alpha, float *limit)
{
    int32_t value = (int32_t)activation;
    if (value < EPMOE_ACTIVATION_SILU || value > EPMOE_ACTIVATION_SIGMOID ||
        (!epmoei_activation_is_gated(activation) && !allow_ungated))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "activation is %d: expected SILU, GELU, GELU_TANH%s", value,
                           allow_ungated ? ", SWIGLU_OAI, NONE or SIGMOID" : " or SWIGLU_OAI");
    if (!(*alpha >= 0.0f && *alpha < INFINITY))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "alpha is %g: expected a finite number, 0 or above",
                           (double)*alpha);
    if (!(*limit >= 0.0f))
        return epmoei_fail(EPMOE_ERROR_INVALID_ARGUMENT, "limit is %g: expected 0 or above", (double)*limit);
    if (activation == EPMOE_ACTIVATION_SWIGLU_OAI) {
        if (*alpha == 0.0f) *alpha = 1.702f;
        if (*limit == 0.0f) *limit = 7.0f;
    }
    return EPMOE_OK;
}
