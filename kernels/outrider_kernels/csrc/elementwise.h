// The small operations between the products, on one row at a time: its result is its own matter.
#pragma once

#include "cache_rows.h"
#include "kernels.h"
#include "lanes.h"

namespace {

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

// x / sqrt(mean(x * x) + eps) * weight; out may be x.
void norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
    Lanes squares = all(0.0f);
    each_lanes(width, [&](int64_t i, int n) INLINE_LAMBDA {
        Lanes values = load_some(x + i, n);
        squares = fma(values, values, squares);
    });
    float mean = sum(squares) / static_cast<float>(width);
    Lanes root = all(__builtin_sqrtf(mean + eps));
    each_lanes(width, [&](int64_t i, int n) INLINE_LAMBDA {
        store_some(out + i, load_some(x + i, n) / root * load_some(weight + i, n), n);
    });
}

// gate / (1 + exp(-gate)) * up
INLINE Lanes silu(Lanes gate, Lanes up) {
    return gate / (all(1.0f) + exp2(gate * all(-LOG2_E))) * up;
}

// One head's halves, turned against each other in place.
INLINE void turn(float* x, const float* cos, const float* signed_sin, int64_t width) {
    int64_t half = width / 2;
    each_lanes(half, [&](int64_t i, int n) INLINE_LAMBDA {
        Lanes a = load_some(x + i, n), b = load_some(x + half + i, n);
        Lanes left = b * load_some(signed_sin + i, n);
        Lanes right = a * load_some(signed_sin + half + i, n);
        store_some(x + i, fma(a, load_some(cos + i, n), left), n);
        store_some(x + half + i, fma(b, load_some(cos + half + i, n), right), n);
    });
}

// Queries and keys in place; keys and values to their slot of the cache.
template <class T>
void rotate_row(const RotaryJob& job, int64_t row) {
    const AttentionShape& shape = job.shape;
    int64_t width = shape.head_dim, size = row_size<T>(width);
    const float* cos = job.cos + job.positions[row] * width;
    const float* signed_sin = job.signed_sin + job.positions[row] * width;
    float* q = job.qkv + row * (shape.heads + 2 * shape.kv_heads) * width;
    for (int64_t head = 0; head < shape.heads + shape.kv_heads; head++)
        turn(q + head * width, cos, signed_sin, width);
    const float* k = q + shape.heads * width;
    const float* v = k + shape.kv_heads * width;
    T* k_slot = static_cast<T*>(job.cache.keys) + job.slots[row] * shape.kv_heads * size;
    T* v_slot = static_cast<T*>(job.cache.values) + job.slots[row] * shape.kv_heads * size;
    for (int64_t head = 0; head < shape.kv_heads; head++) {
        put_row(k + head * width, width, k_slot + head * size);
        put_row(v + head * width, width, v_slot + head * size);
    }
}

INLINE void rotate(const RotaryJob& job, int64_t row) {
    if (job.cache.type == CACHE_INT8)
        rotate_row<int8_t>(job, row);
    else if (job.cache.type == CACHE_BF16)
        rotate_row<bf16>(job, row);
    else
        rotate_row<float>(job, row);
}

}  // namespace
