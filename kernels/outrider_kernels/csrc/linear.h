// Matrix products with weights that lie in strips of columns.
//
// Every element is one chain of multiply-adds in the order of the inputs: its bits depend on its own
// row and column alone. A strip is read from memory once for STRIP_ROWS rows, from one end to the
// other; rows beyond those find it in the cache.
#pragma once

#include "gemm.h"
#include "kernels.h"

namespace {

constexpr int STRIP_LANES = STRIP / LANES;
constexpr int STRIP_ROWS = GEMM_LANES > 1 ? 12 : GEMM_ROWS;  // 12 rows of 2 are 24 sums; 32 registers
constexpr int STRIP_STEP = GEMM_LANES > 1 ? STRIP_LANES : 1;

// Inputs whose weights are asked for ahead of their use: with several rows the processor has too
// much other work in between to see for itself what comes next. Beyond the last strip it is nothing.
constexpr int AHEAD = 128;

template <int R, class W>
void strip_rows(const float* x, int64_t x_stride, const W* strip, int depth, float* sums) {
    for (int n = 0; n < STRIP_LANES; n += STRIP_STEP) {
        auto row = [=](int i) INLINE_LAMBDA {
            const W* weights = strip + i * STRIP;
            for (size_t byte = 0; byte < STRIP * sizeof(W); byte += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(weights + AHEAD * STRIP) + byte);
            return weights + n * LANES;
        };
        gemm_block<R, STRIP_STEP, false>(x, x_stride, row, depth, sums + n * LANES, STRIP);
    }
}

template <class W>
using StripFunction = void (*)(const float*, int64_t, const W*, int, float*);

template <class W, int R>
struct StripTable : StripTable<W, R - 1> {
    StripTable() { this->functions[R] = strip_rows<R, W>; }
};
template <class W>
struct StripTable<W, 0> {
    StripFunction<W> functions[STRIP_ROWS + 1];
};

template <class W>
void strip_sums(const float* x, int64_t x_stride, const W* strip, int depth, int count, float* sums) {
    static const StripTable<W, STRIP_ROWS> table;
    table.functions[count](x, x_stride, strip, depth, sums);
}

}  // namespace
