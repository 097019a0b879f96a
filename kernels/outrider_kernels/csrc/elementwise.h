// The small operations between the products, each in one pass; a row's result is its own matter.
//
// Float32 inside, and rounded once at the end.
#pragma once

#include "kernels.h"
#include "lanes.h"

namespace {

constexpr int64_t ROWS_OF_UNIT = 16;

// Calls f(index of the value, the lanes' number) over a width.
template <class F>
INLINE void each_lanes(int64_t width, F f) {
    for (int64_t i = 0; i < width; i += LANES)
        f(i, static_cast<int>(width - i < LANES ? width - i : LANES));
}

template <class T>
INLINE Lanes load_some(const T* p, int n) {
    return n == LANES ? load(p) : load_first(p, n);
}

template <class T>
INLINE void store_some(T* p, Lanes a, int n) {
    if (n == LANES)
        store(p, a);
    else
        store_first(p, a, n);
}

// x / sqrt(mean(x * x) + eps) * weight
template <class T>
void norm_unit(const void* given, int64_t unit) {
    const NormJob& job = *static_cast<const NormJob*>(given);
    int64_t end = (unit + 1) * ROWS_OF_UNIT < job.num_rows ? (unit + 1) * ROWS_OF_UNIT : job.num_rows;
    for (int64_t row = unit * ROWS_OF_UNIT; row < end; row++)
        for (int64_t part = 0; part < job.parts; part++) {
            const T* x = static_cast<const T*>(job.x) + row * job.stride + part * job.width;
            const float* weight = job.weight + part * job.width;
            T* out = static_cast<T*>(job.out) + (row * job.parts + part) * job.width;
            Lanes squares = all(0.0f);
            each_lanes(job.width, [&](int64_t i, int n) INLINE_LAMBDA {
                Lanes values = load_some(x + i, n);
                squares = fma(values, values, squares);
            });
            float mean = sum(squares) / static_cast<float>(job.width);
            Lanes root = all(__builtin_sqrtf(mean + job.eps));
            each_lanes(job.width, [&](int64_t i, int n) INLINE_LAMBDA {
                store_some(out + i, load_some(x + i, n) / root * load_some(weight + i, n), n);
            });
        }
}

// gate / (1 + exp(-gate)) * up
template <class T>
void silu_unit(const void* given, int64_t unit) {
    const SiluJob& job = *static_cast<const SiluJob*>(given);
    int64_t end = (unit + 1) * ROWS_OF_UNIT < job.num_rows ? (unit + 1) * ROWS_OF_UNIT : job.num_rows;
    for (int64_t row = unit * ROWS_OF_UNIT; row < end; row++) {
        const T* gate = static_cast<const T*>(job.gate_up) + row * 2 * job.width;
        T* out = static_cast<T*>(job.out) + row * job.width;
        each_lanes(job.width, [&](int64_t i, int n) INLINE_LAMBDA {
            Lanes g = load_some(gate + i, n), up = load_some(gate + job.width + i, n);
            Lanes below = all(1.0f) + exp2(g * all(-LOG2_E));
            store_some(out + i, g / below * up, n);
        });
    }
}

// One head's halves, turned against each other.
template <class T>
INLINE void turn(const T* x, const float* cos, const float* signed_sin, int64_t width, T* out) {
    int64_t half = width / 2;
    each_lanes(half, [&](int64_t i, int n) INLINE_LAMBDA {
        Lanes a = load_some(x + i, n), b = load_some(x + half + i, n);
        Lanes left = b * load_some(signed_sin + i, n);
        Lanes right = a * load_some(signed_sin + half + i, n);
        store_some(out + i, fma(a, load_some(cos + i, n), left), n);
        store_some(out + half + i, fma(b, load_some(cos + half + i, n), right), n);
    });
}

template <class T>
void rotary_unit(const void* given, int64_t unit) {
    const RotaryJob& job = *static_cast<const RotaryJob*>(given);
    int64_t width = job.head_dim, kv_width = job.kv_heads * width;
    int64_t end = (unit + 1) * ROWS_OF_UNIT < job.num_rows ? (unit + 1) * ROWS_OF_UNIT : job.num_rows;
    for (int64_t row = unit * ROWS_OF_UNIT; row < end; row++) {
        const T* x = static_cast<const T*>(job.queries_keys) + row * job.qk_stride;
        const float *cos = job.cos + row * width, *signed_sin = job.signed_sin + row * width;
        T* q = static_cast<T*>(job.q) + row * job.heads * width;
        for (int64_t head = 0; head < job.heads; head++)
            turn(x + head * width, cos, signed_sin, width, q + head * width);
        if (row >= job.num_tokens) continue;  // padding
        T* k = static_cast<T*>(job.k_cache) + job.slots[row] * kv_width;
        for (int64_t head = 0; head < job.kv_heads; head++)
            turn(x + (job.heads + head) * width, cos, signed_sin, width, k + head * width);
        std::memcpy(static_cast<T*>(job.v_cache) + job.slots[row] * kv_width,
                    static_cast<const T*>(job.values) + row * job.v_stride, kv_width * sizeof(T));
    }
}

}  // namespace
