// Matrix products with weights that lie in strips of columns.
//
// Every element is one chain of multiply-adds in the order of the inputs: its bits depend on its own
// row and column alone. A strip is read from memory once for STRIP_ROWS rows, from one end to the
// other; rows beyond those find it in the cache.
#pragma once

#include "gemm.h"
#include "kernels.h"
#include "scratch.h"

namespace {

constexpr int STRIP_LANES = STRIP / LANES;
constexpr int STRIP_ROWS = GEMM_LANES > 1 ? 12 : GEMM_ROWS;  // 12 rows of 2 are 24 sums; 32 registers
constexpr int STRIP_STEP = GEMM_LANES > 1 ? STRIP_LANES : 1;

// Inputs whose weights are asked for ahead of their use: with several rows the processor has too
// much other work in between to see for itself what comes next. Beyond the last strip it is nothing.
constexpr int AHEAD = 128;

// A job, and its rows as float32.
struct Product {
    const LinearJob& job;
    const float* x;
    int64_t x_stride;
};

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

template <class T>
INLINE void store_sums(const float* sums, const float* bias, T* out, int num_columns) {
    for (int n = 0; n < num_columns; n += LANES) {
        int count = num_columns - n < LANES ? num_columns - n : LANES;
        Lanes values = load(sums + n);
        if (bias) values = values + (count == LANES ? load(bias + n) : load_first(bias + n, count));
        if (count == LANES)
            store(out + n, values);
        else
            store_first(out + n, values, count);
    }
}

// Sums of some rows in one strip to their places.
INLINE void store_strip(const LinearJob& job, int64_t unit, int64_t row, int count,
                        const float* sums) {
    int64_t column = unit * STRIP;
    int num_columns = static_cast<int>(job.num_out - column < STRIP ? job.num_out - column : STRIP);
    const float* bias = job.bias ? job.bias + column : nullptr;
    for (int r = 0; r < count; r++) {
        int64_t place = (row + r) * job.num_out + column;
        if (job.x_is_bf16)
            store_sums(sums + r * STRIP, bias, static_cast<bf16*>(job.out) + place, num_columns);
        else
            store_sums(sums + r * STRIP, bias, static_cast<float*>(job.out) + place, num_columns);
    }
}

// One strip of columns, for all rows.
template <class W>
void linear_unit(const void* given, int64_t unit) {
    static const StripTable<W, STRIP_ROWS> table;
    const Product& product = *static_cast<const Product*>(given);
    const LinearJob& job = product.job;
    const W* strip = static_cast<const W*>(job.weight) + unit * job.num_in * STRIP;
    alignas(64) float sums[STRIP_ROWS * STRIP];
    for (int64_t row = 0; row < job.num_rows; row += STRIP_ROWS) {
        int count = static_cast<int>(job.num_rows - row < STRIP_ROWS ? job.num_rows - row : STRIP_ROWS);
        table.functions[count](product.x + row * product.x_stride, product.x_stride, strip,
                               static_cast<int>(job.num_in), sums);
        store_strip(job, unit, row, count, sums);
    }
}

template <class X>
void widen_rows(const LinearJob& job, float* to, int64_t stride) {
    const X* from = static_cast<const X*>(job.x);
    for (int64_t row = 0; row < job.num_rows; row++, from += job.num_in, to += stride)
        for (int64_t i = 0; i < job.num_in; i += LANES) {
            int count = static_cast<int>(job.num_in - i < LANES ? job.num_in - i : LANES);
            store(to + i, count == LANES ? load(from + i) : load_first(from + i, count));
        }
}

}  // namespace
