// Small matrix products whose every element is one chain of multiply-adds in the order of depth.
//
// An element's bits depend on its own row and column alone, however many others are computed with
// it: blocks of rows and columns only keep sums in registers.
#pragma once

#include "lanes.h"

namespace {

constexpr int GEMM_ROWS = 6;

// c[R, N * 16] (+)= a[R, depth] b[depth, N * 16]; b(i) is where row i of b begins.
template <int R, int N, bool ADD, class B>
INLINE void gemm_block(const float* a, int64_t a_stride, B b, int depth, float* c, int64_t c_stride) {
    Lanes sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++)
            sums[r][n] = ADD ? load(c + r * c_stride + n * LANES) : all(0.0f);
    for (int i = 0; i < depth; i++) {
        auto row = b(i);
        Lanes columns[N];
        for (int n = 0; n < N; n++) columns[n] = load(row + n * LANES);
        for (int r = 0; r < R; r++) {
            Lanes factor = all(a[r * a_stride + i]);
            for (int n = 0; n < N; n++) sums[r][n] = fma(factor, columns[n], sums[r][n]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(c + r * c_stride + n * LANES, sums[r][n]);
}

template <int R, bool ADD, class B>
INLINE void gemm_rows(const float* a, int64_t a_stride, B b, int depth, float* c, int64_t c_stride,
                      int num_lanes) {
    int n = 0;
    for (; n + GEMM_LANES <= num_lanes; n += GEMM_LANES)
        gemm_block<R, GEMM_LANES, ADD>(
            a, a_stride, [=](int i) INLINE_LAMBDA { return b(i) + n * LANES; }, depth,
            c + n * LANES, c_stride);
    for (; n < num_lanes; n++)
        gemm_block<R, 1, ADD>(
            a, a_stride, [=](int i) INLINE_LAMBDA { return b(i) + n * LANES; }, depth,
            c + n * LANES, c_stride);
}

// c[num_rows, num_lanes * 16] (+)= a[num_rows, depth] b.
template <bool ADD, class B>
INLINE void gemm(const float* a, int64_t a_stride, B b, int depth, float* c, int64_t c_stride,
                 int num_rows, int num_lanes) {
    for (; num_rows >= GEMM_ROWS; num_rows -= GEMM_ROWS) {
        gemm_rows<GEMM_ROWS, ADD>(a, a_stride, b, depth, c, c_stride, num_lanes);
        a += GEMM_ROWS * a_stride;
        c += GEMM_ROWS * c_stride;
    }
    switch (num_rows) {
        case 5: gemm_rows<5, ADD>(a, a_stride, b, depth, c, c_stride, num_lanes); break;
        case 4: gemm_rows<4, ADD>(a, a_stride, b, depth, c, c_stride, num_lanes); break;
        case 3: gemm_rows<3, ADD>(a, a_stride, b, depth, c, c_stride, num_lanes); break;
        case 2: gemm_rows<2, ADD>(a, a_stride, b, depth, c, c_stride, num_lanes); break;
        case 1: gemm_rows<1, ADD>(a, a_stride, b, depth, c, c_stride, num_lanes); break;
        default: break;
    }
}

}  // namespace
