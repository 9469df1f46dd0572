/* d += a b by wgmma m64nNk16 with fp32 accumulators, a of bf16 in registers, b in shared memory, K-major: one function
 * per N. a is operand A of mma.m16n8k16 for the 16 rows of each warp of the warpgroup; d as in ptx_wgmma.cuh. The
 * tensor cores read a while the instruction runs: it must be left alone until ptx_wgmma_wait says so, which the
 * compiler sees to as long as every such wait is there. */
#ifndef EPMOEI_PTX_WGMMA_REGISTERS_CUH
#define EPMOEI_PTX_WGMMA_REGISTERS_CUH

#include "kernels/ptx_wgmma.cuh"

/* What makes a is done here and not later: between the fence and the instruction it would make the compiler wait for
 * every instruction before the next. */
__device__ __forceinline__ void ptx_define(uint32_t (&a)[4])
{
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

template <int kN> struct ptx_wgmma_registers;

/* n columns, r = n/2 registers; those of a are operands r to r + 3, the descriptor is r + 4. */
#define EPMOEI_WGMMA_REGISTERS(n, r, a0, a1, a2, a3, b_index)                                                          \
    template <> struct ptx_wgmma_registers<n> {                                                                        \
        template <int kRegisters>                                                                                      \
        static __device__ __forceinline__ void run(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b)         \
        {                                                                                                              \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" EPMOEI_NAMES_##r                 \
                         "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_index ", 1, 1, 1, 0;\n"                   \
                         : EPMOEI_REGS_##r                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };

EPMOEI_WGMMA_REGISTERS(8, 4, 4, 5, 6, 7, 8)
EPMOEI_WGMMA_REGISTERS(16, 8, 8, 9, 10, 11, 12)
EPMOEI_WGMMA_REGISTERS(24, 12, 12, 13, 14, 15, 16)
EPMOEI_WGMMA_REGISTERS(32, 16, 16, 17, 18, 19, 20)
EPMOEI_WGMMA_REGISTERS(48, 24, 24, 25, 26, 27, 28)
EPMOEI_WGMMA_REGISTERS(64, 32, 32, 33, 34, 35, 36)
EPMOEI_WGMMA_REGISTERS(80, 40, 40, 41, 42, 43, 44)
EPMOEI_WGMMA_REGISTERS(96, 48, 48, 49, 50, 51, 52)
EPMOEI_WGMMA_REGISTERS(112, 56, 56, 57, 58, 59, 60)
EPMOEI_WGMMA_REGISTERS(128, 64, 64, 65, 66, 67, 68)
EPMOEI_WGMMA_REGISTERS(144, 72, 72, 73, 74, 75, 76)
EPMOEI_WGMMA_REGISTERS(160, 80, 80, 81, 82, 83, 84)
EPMOEI_WGMMA_REGISTERS(176, 88, 88, 89, 90, 91, 92)
EPMOEI_WGMMA_REGISTERS(192, 96, 96, 97, 98, 99, 100)
EPMOEI_WGMMA_REGISTERS(208, 104, 104, 105, 106, 107, 108)
EPMOEI_WGMMA_REGISTERS(224, 112, 112, 113, 114, 115, 116)
EPMOEI_WGMMA_REGISTERS(240, 120, 120, 121, 122, 123, 124)
EPMOEI_WGMMA_REGISTERS(256, 128, 128, 129, 130, 131, 132)

#endif
