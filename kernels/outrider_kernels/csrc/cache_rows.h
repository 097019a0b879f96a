// Rows of the cache: what it holds of one token and KV head.
//
// Either head_dim values in float32 or bfloat16, or as many bytes, and behind them a scale for each
// KV_GROUP of them; outrider_kernels/kv_rows.py has those in plain torch. A row is rounded by its own
// values alone.
#pragma once

#include "bytes.h"
#include "kernels.h"

namespace {

template <class T>
constexpr bool HAS_SCALES = false;
template <>
constexpr bool HAS_SCALES<int8_t> = true;

// Elements of a row.
template <class T>
INLINE int64_t row_size(int64_t width) {
    return HAS_SCALES<T> ? width + 2 * ((width + KV_GROUP - 1) / KV_GROUP) : width;
}

// Of the group that value d is in.
INLINE float scale_of(const int8_t* row, int64_t width, int64_t d) {
    bf16 scale;
    std::memcpy(&scale, row + width + d / KV_GROUP * 2, sizeof scale);
    return to_float(scale);
}
template <class T>
INLINE float scale_of(const T*, int64_t, int64_t) {
    return 1.0f;
}

// A row into the cache.
INLINE void put_row(const float* x, int64_t width, int8_t* out) {
    for (int64_t d = 0; d < width; d += KV_GROUP) {
        int64_t count = width - d < KV_GROUP ? width - d : KV_GROUP;
        constexpr int PARTS = KV_GROUP / LANES;
        Lanes values[PARTS], most = all(0.0f), spoilt = all(0.0f);
        for (int i = 0; i < PARTS; i++) {
            values[i] = load_up_to(x + d + i * LANES, static_cast<int>(count - i * LANES));
            most = max(most, max(values[i], all(0.0f) - values[i]));
            spoilt = spoilt + (values[i] - values[i]);  // NaN if there is no number
        }
        float largest = max_of(most);
        uint32_t bits = largest > 1e-30f ? bits_of_float(largest / 127.0f) : 0;
        // Rounded up, so that the largest value is no more than 127 steps.
        bf16 scale = {static_cast<uint16_t>((bits + 0xFFFF) >> 16)};
        Lanes steps = all(scale.bits == 0 ? 0.0f : 1.0f / to_float(scale));
        int8_t bytes[KV_GROUP];
        for (int i = 0; i < PARTS; i++)
            store_bytes(bytes + i * LANES, values[i] * steps + all(WHOLE));
        std::memcpy(out + d, bytes, count);
        if (sum(spoilt) != 0.0f) scale.bits = 0x7FC0;  // NaN
        std::memcpy(out + width + d / KV_GROUP * 2, &scale, sizeof scale);
    }
}
template <class T>
INLINE void put_row(const float* x, int64_t width, T* out) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) store(out + d, load(x + d));
    int left = static_cast<int>(width - d);
    store_first(out + d, load_up_to(x + d, left), left);
}

}  // namespace
