/* E4M3 from its definition, by arithmetic on doubles and a search: independent of base/fp8.h. */
#ifndef EPMOE_E4M3_ORACLE_H
#define EPMOE_E4M3_ORACLE_H

#include <math.h>
#include <stdint.h>

/* Codes 0x00..0x7E and their negatives; 0x7F and 0xFF are NaN. */
static inline double e4m3_value(int code)
{
    int exponent = (code >> 3) & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 128 ? -magnitude : magnitude;
}

/* The nearest code, the even one of two, saturating; the sign of zero is kept. */
static inline uint8_t e4m3_nearest(double value)
{
    if (isnan(value)) return 0x7F;
    int best = 0;
    for (int code = 1; code < 127; code++) {
        double now = fabs(fabs(value) - e4m3_value(code)), before = fabs(fabs(value) - e4m3_value(best));
        if (now < before || (now == before && !(code & 1) && isfinite(value))) best = code;
    }
    if (isinf(value)) best = 126;
    return (uint8_t)(best | (signbit(value) ? 128 : 0));
}

#endif
