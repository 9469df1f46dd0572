/* A .safetensors file: what is accepted lies within the file, and every tensor is found by its name. */
#include "moe/safetensors.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    epmoei_safetensors_t *file = NULL;
    if (epmoei_safetensors_open(fuzz_file(0, data, size), &file) != EPMOE_OK) {
        fuzz_require(!file && epmoe_last_error()[0], "a failure without a text, or with a file");
        return 0;
    }
    int64_t total = 0;
    volatile unsigned char sum = 0;
    for (int64_t i = 0; i < epmoei_safetensors_count(file); i++) {
        const epmoei_tensor_t *tensor = epmoei_safetensors_at(file, i);
        const unsigned char *bytes = tensor->data;
        for (int64_t b = 0; b < tensor->bytes; b++) sum = (unsigned char)(sum + bytes[b]);
        int64_t elements = 1;
        for (int32_t d = 0; d < tensor->num_dims; d++) elements *= tensor->shape[d];
        fuzz_require(elements == tensor->num_elements, "num_elements is not the product of the shape");
        fuzz_require(epmoei_safetensors_find(file, tensor->name) == tensor, "a tensor is not found by its name");
        total += tensor->bytes;
    }
    fuzz_require(total <= (int64_t)size, "more bytes than the file has");
    epmoei_safetensors_close(file);
    fuzz_require(epmoei_alloc_live() == 0, "memory is left");
    return 0;
}
