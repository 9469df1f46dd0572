/* d += a b by wgmma m64nNk16 with fp32 accumulators, both operands in shared memory, K-major: one function per N.
 * Thread t of the warpgroup holds, for each block j of 8 columns, d[4j..4j+1] = row 16*(t/32) + (t%32)/4, columns 8j +
 * 2*(t%4) and + 1, and d[4j+2..4j+3] = the same columns eight rows below. The accumulators of a narrow instruction are
 * the first N/2 of the widest one's. */
#ifndef EPMOEI_PTX_WGMMA_CUH
#define EPMOEI_PTX_WGMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

/* The instruction names every register of its list, and the operands are named once more as constraints: both lists
 * grow by four registers, one block of 8 columns. */
#define EPMOEI_D4(i)     "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EPMOEI_NAMES_4   "%0, %1, %2, %3"
#define EPMOEI_NAMES_8   EPMOEI_NAMES_4 ", %4, %5, %6, %7"
#define EPMOEI_NAMES_12  EPMOEI_NAMES_8 ", %8, %9, %10, %11"
#define EPMOEI_NAMES_16  EPMOEI_NAMES_12 ", %12, %13, %14, %15"
#define EPMOEI_NAMES_20  EPMOEI_NAMES_16 ", %16, %17, %18, %19"
#define EPMOEI_NAMES_24  EPMOEI_NAMES_20 ", %20, %21, %22, %23"
#define EPMOEI_NAMES_28  EPMOEI_NAMES_24 ", %24, %25, %26, %27"
#define EPMOEI_NAMES_32  EPMOEI_NAMES_28 ", %28, %29, %30, %31"
#define EPMOEI_NAMES_36  EPMOEI_NAMES_32 ", %32, %33, %34, %35"
#define EPMOEI_NAMES_40  EPMOEI_NAMES_36 ", %36, %37, %38, %39"
#define EPMOEI_NAMES_44  EPMOEI_NAMES_40 ", %40, %41, %42, %43"
#define EPMOEI_NAMES_48  EPMOEI_NAMES_44 ", %44, %45, %46, %47"
#define EPMOEI_NAMES_52  EPMOEI_NAMES_48 ", %48, %49, %50, %51"
#define EPMOEI_NAMES_56  EPMOEI_NAMES_52 ", %52, %53, %54, %55"
#define EPMOEI_NAMES_60  EPMOEI_NAMES_56 ", %56, %57, %58, %59"
#define EPMOEI_NAMES_64  EPMOEI_NAMES_60 ", %60, %61, %62, %63"
#define EPMOEI_NAMES_68  EPMOEI_NAMES_64 ", %64, %65, %66, %67"
#define EPMOEI_NAMES_72  EPMOEI_NAMES_68 ", %68, %69, %70, %71"
#define EPMOEI_NAMES_76  EPMOEI_NAMES_72 ", %72, %73, %74, %75"
#define EPMOEI_NAMES_80  EPMOEI_NAMES_76 ", %76, %77, %78, %79"
#define EPMOEI_NAMES_84  EPMOEI_NAMES_80 ", %80, %81, %82, %83"
#define EPMOEI_NAMES_88  EPMOEI_NAMES_84 ", %84, %85, %86, %87"
#define EPMOEI_NAMES_92  EPMOEI_NAMES_88 ", %88, %89, %90, %91"
#define EPMOEI_NAMES_96  EPMOEI_NAMES_92 ", %92, %93, %94, %95"
#define EPMOEI_NAMES_100 EPMOEI_NAMES_96 ", %96, %97, %98, %99"
#define EPMOEI_NAMES_104 EPMOEI_NAMES_100 ", %100, %101, %102, %103"
#define EPMOEI_NAMES_108 EPMOEI_NAMES_104 ", %104, %105, %106, %107"
#define EPMOEI_NAMES_112 EPMOEI_NAMES_108 ", %108, %109, %110, %111"
#define EPMOEI_NAMES_116 EPMOEI_NAMES_112 ", %112, %113, %114, %115"
#define EPMOEI_NAMES_120 EPMOEI_NAMES_116 ", %116, %117, %118, %119"
#define EPMOEI_NAMES_124 EPMOEI_NAMES_120 ", %120, %121, %122, %123"
#define EPMOEI_NAMES_128 EPMOEI_NAMES_124 ", %124, %125, %126, %127"
#define EPMOEI_REGS_4    EPMOEI_D4(0)
#define EPMOEI_REGS_8    EPMOEI_REGS_4, EPMOEI_D4(4)
#define EPMOEI_REGS_12   EPMOEI_REGS_8, EPMOEI_D4(8)
#define EPMOEI_REGS_16   EPMOEI_REGS_12, EPMOEI_D4(12)
#define EPMOEI_REGS_20   EPMOEI_REGS_16, EPMOEI_D4(16)
#define EPMOEI_REGS_24   EPMOEI_REGS_20, EPMOEI_D4(20)
#define EPMOEI_REGS_28   EPMOEI_REGS_24, EPMOEI_D4(24)
#define EPMOEI_REGS_32   EPMOEI_REGS_28, EPMOEI_D4(28)
#define EPMOEI_REGS_36   EPMOEI_REGS_32, EPMOEI_D4(32)
#define EPMOEI_REGS_40   EPMOEI_REGS_36, EPMOEI_D4(36)
#define EPMOEI_REGS_44   EPMOEI_REGS_40, EPMOEI_D4(40)
#define EPMOEI_REGS_48   EPMOEI_REGS_44, EPMOEI_D4(44)
#define EPMOEI_REGS_52   EPMOEI_REGS_48, EPMOEI_D4(48)
#define EPMOEI_REGS_56   EPMOEI_REGS_52, EPMOEI_D4(52)
#define EPMOEI_REGS_60   EPMOEI_REGS_56, EPMOEI_D4(56)
#define EPMOEI_REGS_64   EPMOEI_REGS_60, EPMOEI_D4(60)
#define EPMOEI_REGS_68   EPMOEI_REGS_64, EPMOEI_D4(64)
#define EPMOEI_REGS_72   EPMOEI_REGS_68, EPMOEI_D4(68)
#define EPMOEI_REGS_76   EPMOEI_REGS_72, EPMOEI_D4(72)
#define EPMOEI_REGS_80   EPMOEI_REGS_76, EPMOEI_D4(76)
#define EPMOEI_REGS_84   EPMOEI_REGS_80, EPMOEI_D4(80)
#define EPMOEI_REGS_88   EPMOEI_REGS_84, EPMOEI_D4(84)
#define EPMOEI_REGS_92   EPMOEI_REGS_88, EPMOEI_D4(88)
#define EPMOEI_REGS_96   EPMOEI_REGS_92, EPMOEI_D4(92)
#define EPMOEI_REGS_100  EPMOEI_REGS_96, EPMOEI_D4(96)
#define EPMOEI_REGS_104  EPMOEI_REGS_100, EPMOEI_D4(100)
#define EPMOEI_REGS_108  EPMOEI_REGS_104, EPMOEI_D4(104)
#define EPMOEI_REGS_112  EPMOEI_REGS_108, EPMOEI_D4(108)
#define EPMOEI_REGS_116  EPMOEI_REGS_112, EPMOEI_D4(112)
#define EPMOEI_REGS_120  EPMOEI_REGS_116, EPMOEI_D4(116)
#define EPMOEI_REGS_124  EPMOEI_REGS_120, EPMOEI_D4(120)
#define EPMOEI_REGS_128  EPMOEI_REGS_124, EPMOEI_D4(124)

/* n columns, r = n/2 registers; the descriptors are operands r and r + 1. */
#define EPMOEI_WGMMA_TYPED(n, r, a_index, b_index, types)                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " {" EPMOEI_NAMES_##r                         \
                 "}, %" #a_index ", %" #b_index ", 1, 1, 1, 0, 0;\n"                                                   \
                 : EPMOEI_REGS_##r                                                                                     \
                 : "l"(a), "l"(b))

template <typename T> struct ptx_is_bf16 {
    static constexpr bool value = false;
};
template <> struct ptx_is_bf16<__nv_bfloat16> {
    static constexpr bool value = true;
};

template <typename T, int kN> struct ptx_wgmma;

#define EPMOEI_WGMMA(n, r, a_index, b_index)                                                                           \
    template <typename T> struct ptx_wgmma<T, n> {                                                                     \
        template <int kRegisters>                                                                                      \
        static __device__ __forceinline__ void run(float (&d)[kRegisters], uint64_t a, uint64_t b)                     \
        {                                                                                                              \
            if constexpr (ptx_is_bf16<T>::value)                                                                       \
                EPMOEI_WGMMA_TYPED(n, r, a_index, b_index, "bf16.bf16");                                               \
            else                                                                                                       \
                EPMOEI_WGMMA_TYPED(n, r, a_index, b_index, "f16.f16");                                                 \
        }                                                                                                              \
    };

EPMOEI_WGMMA(8, 4, 4, 5)
EPMOEI_WGMMA(16, 8, 8, 9)
EPMOEI_WGMMA(24, 12, 12, 13)
EPMOEI_WGMMA(32, 16, 16, 17)
EPMOEI_WGMMA(40, 20, 20, 21)
EPMOEI_WGMMA(48, 24, 24, 25)
EPMOEI_WGMMA(56, 28, 28, 29)
EPMOEI_WGMMA(64, 32, 32, 33)
EPMOEI_WGMMA(80, 40, 40, 41)
EPMOEI_WGMMA(96, 48, 48, 49)
EPMOEI_WGMMA(112, 56, 56, 57)
EPMOEI_WGMMA(128, 64, 64, 65)
EPMOEI_WGMMA(144, 72, 72, 73)
EPMOEI_WGMMA(160, 80, 80, 81)
EPMOEI_WGMMA(176, 88, 88, 89)
EPMOEI_WGMMA(192, 96, 96, 97)
EPMOEI_WGMMA(208, 104, 104, 105)
EPMOEI_WGMMA(224, 112, 112, 113)
EPMOEI_WGMMA(240, 120, 120, 121)
EPMOEI_WGMMA(256, 128, 128, 129)

/* The operands of two products in a row. first: d = a b and add: d += a b, both operands as above. add_rows: d += a b
 * with a in registers, four for each k16, as accumulators lie when they are packed: {row r, columns 2c and 2c + 1},
 * {row r + 8, the same}, {row r, columns 8 further}, {row r + 8}; and b in shared memory with its N columns, not its K,
 * side by side. */
template <typename T, int kN> struct ptx_wgmma_pair;

#define EPMOEI_OUT_D4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define EPMOEI_OUT_16(i) EPMOEI_OUT_D4(i), EPMOEI_OUT_D4(i + 4), EPMOEI_OUT_D4(i + 8), EPMOEI_OUT_D4(i + 12)
#define EPMOEI_OUT_32    EPMOEI_OUT_16(0), EPMOEI_OUT_16(16)
#define EPMOEI_OUT_64    EPMOEI_OUT_32, EPMOEI_OUT_16(32), EPMOEI_OUT_16(48)

#define EPMOEI_WGMMA_FIRST_TYPED(n, r, a_index, b_index, types)                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " {" EPMOEI_NAMES_##r                         \
                 "}, %" #a_index ", %" #b_index ", 0, 1, 1, 0, 0;\n"                                                   \
                 : EPMOEI_OUT_##r                                                                                      \
                 : "l"(a), "l"(b))
#define EPMOEI_WGMMA_ROWS_TYPED(n, r, a0, a1, a2, a3, b_index, types)                                                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types " {" EPMOEI_NAMES_##r                         \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_index ", 1, 1, 1, 1;\n"                           \
                 : EPMOEI_REGS_##r                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

#define EPMOEI_WGMMA_PAIR(n, r, i0, i1, i2, i3, i4)                                                                    \
    template <typename T> struct ptx_wgmma_pair<T, n> {                                                                \
        static __device__ __forceinline__ void first(float (&d)[r], uint64_t a, uint64_t b)                            \
        {                                                                                                              \
            if constexpr (ptx_is_bf16<T>::value)                                                                       \
                EPMOEI_WGMMA_FIRST_TYPED(n, r, i0, i1, "bf16.bf16");                                                   \
            else                                                                                                       \
                EPMOEI_WGMMA_FIRST_TYPED(n, r, i0, i1, "f16.f16");                                                     \
        }                                                                                                              \
        static __device__ __forceinline__ void add(float (&d)[r], uint64_t a, uint64_t b)                              \
        {                                                                                                              \
            if constexpr (ptx_is_bf16<T>::value)                                                                       \
                EPMOEI_WGMMA_TYPED(n, r, i0, i1, "bf16.bf16");                                                         \
            else                                                                                                       \
                EPMOEI_WGMMA_TYPED(n, r, i0, i1, "f16.f16");                                                           \
        }                                                                                                              \
        static __device__ __forceinline__ void add_rows(float (&d)[r], const uint32_t (&a)[4], uint64_t b)             \
        {                                                                                                              \
            if constexpr (ptx_is_bf16<T>::value)                                                                       \
                EPMOEI_WGMMA_ROWS_TYPED(n, r, i0, i1, i2, i3, i4, "bf16.bf16");                                        \
            else                                                                                                       \
                EPMOEI_WGMMA_ROWS_TYPED(n, r, i0, i1, i2, i3, i4, "f16.f16");                                          \
        }                                                                                                              \
    };

EPMOEI_WGMMA_PAIR(64, 32, 32, 33, 34, 35, 36)
EPMOEI_WGMMA_PAIR(128, 64, 64, 65, 66, 67, 68)

/* Accumulators are read or written behind this point alone, whatever the compiler knows of who writes them. */
template <int kCount> __device__ __forceinline__ void ptx_wgmma_hold(float (&d)[kCount])
{
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#endif
