/* What the tests of the single ops share: rejected calls and struct sizes are tried in the same way for each. */
#ifndef EPMOE_OP_TESTING_H
#define EPMOE_OP_TESTING_H

#include "tests/testing.h"

#include <criterion/criterion.h>
#include <stddef.h>

/* Calls op with a copy `bad` of base that the last argument, a statement, has spoilt, and expects the status, a message
 * that names the argument, and `untouched` to hold afterwards. */
#define OP_REJECTS(op, base, expected, needle, untouched, statement)                                                   \
    do {                                                                                                               \
        __typeof__(base) bad = (base);                                                                                 \
        statement;                                                                                                     \
        epmoe_status_t got_ = op(&bad, NULL);                                                                          \
        cr_assert_eq(got_, (expected), "%s: status %d (%s)", #statement, (int)got_, epmoe_last_error());               \
        cr_assert(strstr(epmoe_last_error(), needle), "%s: message '%s' lacks '%s'", #statement, epmoe_last_error(),   \
                  needle);                                                                                             \
        cr_assert(untouched, "%s: an output was written", #statement);                                                 \
    } while (0)

#define OP_INVALID(op, base, needle, untouched, statement)                                                             \
    OP_REJECTS(op, base, EPMOE_ERROR_INVALID_ARGUMENT, needle, untouched, statement)

/* A struct_size that is too small to be one, a shorter struct of an older caller (bytes past short_size are garbage
 * and must not count), a longer one with a zero tail, and one whose tail is not zero. `accepted` must hold after each
 * call that succeeds; `untouched` after each that fails, which are the first ones. */
#define OP_STRUCT_SIZES(op, base, short_size, untouched, accepted)                                                     \
    do {                                                                                                               \
        enum { FULL_ = sizeof(base), TAIL_ = 24 };                                                                     \
        union {                                                                                                        \
            __typeof__(base) args;                                                                                     \
            unsigned char bytes[FULL_ + TAIL_];                                                                        \
        } sized_;                                                                                                      \
        OP_INVALID(op, base, "struct_size", untouched, bad.struct_size = 0);                                           \
        OP_INVALID(op, base, "struct_size", untouched, bad.struct_size = 1u << 20);                                    \
        cr_assert_eq(op(NULL, NULL), EPMOE_ERROR_INVALID_ARGUMENT);                                                    \
        for (size_t at_ = FULL_; at_ < FULL_ + TAIL_; at_ += TAIL_ - 1) {                                              \
            memset(&sized_, 0, sizeof sized_);                                                                         \
            sized_.args = (base);                                                                                      \
            memset(sized_.bytes + FULL_, 0, TAIL_);                                                                    \
            sized_.bytes[at_] = 1;                                                                                     \
            sized_.args.struct_size = FULL_ + TAIL_;                                                                   \
            cr_assert_eq(op(&sized_.args, NULL), EPMOE_ERROR_NOT_SUPPORTED);                                           \
            cr_assert(untouched);                                                                                      \
            sized_.bytes[at_] = 0;                                                                                     \
        }                                                                                                              \
        cr_assert_eq(op(&sized_.args, NULL), EPMOE_OK, "%s", epmoe_last_error());                                      \
        cr_assert(accepted);                                                                                           \
        sized_.args.struct_size = (short_size);                                                                        \
        memset(sized_.bytes + (short_size), 0xFF, FULL_ + TAIL_ - (short_size));                                       \
        cr_assert_eq(op(&sized_.args, NULL), EPMOE_OK, "%s", epmoe_last_error());                                      \
        cr_assert(accepted);                                                                                           \
    } while (0)

/* Bit for bit, but any NaN equals any other: which operand's payload survives is the compiler's choice. */
static inline bool op_same_bits(const void *a, const void *b, epmoe_dtype_t dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = epmoei_load(a, dtype, i), y = epmoei_load(b, dtype, i);
        if (x != x && y != y) continue;
        if (epmoei_f32_bits(x) != epmoei_f32_bits(y)) return false;
    }
    return true;
}

/* The float dtypes, their names and half an ulp of 1: what one rounding may cost. */
static const struct {
    epmoe_dtype_t dtype;
    double half_ulp;
} op_dtypes[] = {{EPMOE_F32, 0x1p-24}, {EPMOE_BF16, 0x1p-8}, {EPMOE_F16, 0x1p-11}};
#define OP_NUM_DTYPES 3

#endif
