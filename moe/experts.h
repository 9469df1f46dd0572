/* The routed experts as one call; the maths stand at epmoe_experts_args_t. */
#ifndef EPMOEI_EXPERTS_H
#define EPMOEI_EXPERTS_H

#include "moe/stages.h"

/* epmoe_experts with arguments that are already checked. Ends a stage of `stages` (may be
 * NULL) after each. */
epmoe_status_t epmoei_experts_run(const epmoe_experts_args_t *args, epmoe_stream_t stream, epmoei_stages_t *stages);
/* Sizes, enums and formats only; defaults filled. */
epmoe_status_t epmoei_experts_check_shape(const epmoe_experts_args_t *args, epmoe_experts_args_t *out);

#endif
