// Keys lie row by row in the cache; a product over many keys wants them side by side.
#pragma once

#include "cache_rows.h"
#include "lanes.h"

namespace {

constexpr int KEY_TILE = 64;

#if defined(__AVX512F__)

// out[d * KEY_TILE + k] = rows[k][d] for 16 keys and 16 values, by the keys' scales if T has any.
template <class T>
INLINE void transpose_16(const T* const* rows, int64_t d, const float* scales, float* out) {
    __m512 r[16], t[16];
    auto put = [=](int i, __m512 keys) INLINE_LAMBDA {
        if constexpr (HAS_SCALES<T>) keys = _mm512_mul_ps(keys, _mm512_loadu_ps(scales));
        _mm512_storeu_ps(out + i * KEY_TILE, keys);
    };
    for (int i = 0; i < 16; i++) r[i] = load(rows[i] + d).v;
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int half = 0; half < 16; half += 8)
        for (int i = half; i < half + 4; i++) {
            t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
        }
    for (int i = 0; i < 8; i++) {
        put(i, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
        put(i + 8, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD));
    }
}

#elif defined(__AVX2__)

INLINE __m256 load_8(const float* p) { return _mm256_loadu_ps(p); }
template <class T>
INLINE __m256 load_8(const T* p) {
    return widen(p);
}

template <class T>
INLINE void transpose_8(const T* const* rows, int64_t d, const float* scales, float* out) {
    __m256 r[8], t[8];
    auto put = [=](int i, __m256 keys) INLINE_LAMBDA {
        if constexpr (HAS_SCALES<T>) keys = _mm256_mul_ps(keys, _mm256_loadu_ps(scales));
        _mm256_storeu_ps(out + i * KEY_TILE, keys);
    };
    for (int i = 0; i < 8; i++) r[i] = load_8(rows[i] + d);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            __m256d a = _mm256_castps_pd(t[i + j]), b = _mm256_castps_pd(t[i + j + 2]);
            r[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            r[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    for (int i = 0; i < 4; i++) {
        put(i, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        put(i + 4, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

template <class T>
INLINE void transpose_16(const T* const* rows, int64_t d, const float* scales, float* out) {
    for (int k = 0; k < 16; k += 8)
        for (int i = 0; i < 16; i += 8)
            transpose_8(rows + k, d + i, scales + k, out + i * KEY_TILE + k);
}

#else

template <class T>
INLINE void transpose_16(const T* const* rows, int64_t d, const float* scales, float* out) {
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) {
            float key = to_float(rows[k][d + i]);
            out[i * KEY_TILE + k] = HAS_SCALES<T> ? key * scales[k] : key;
        }
}

#endif

// out[width, KEY_TILE] from num_keys rows of `width` values. What stands where there is no key is
// never looked at: rows of the last few keys are repeated.
template <class T>
INLINE void transpose_keys(const T** rows, int num_keys, int64_t width, float* out) {
    int rounded = (num_keys + 15) / 16 * 16;
    for (int k = num_keys; k < rounded; k++) rows[k] = rows[num_keys - 1];
    for (int k = 0; k < rounded; k += 16) {
        float scales[16] = {};
        int64_t d = 0;
        for (; d + 16 <= width; d += 16) {
            if (HAS_SCALES<T> && d % KV_GROUP == 0)
                for (int i = 0; i < 16; i++) scales[i] = scale_of(rows[k + i], width, d);
            transpose_16(rows + k, d, scales, out + d * KEY_TILE + k);
        }
        for (; d < width; d++)
            for (int i = 0; i < 16; i++) {
                float key = to_float(rows[k + i][d]);
                if (HAS_SCALES<T>) key = key * scale_of(rows[k + i], width, d);
                out[d * KEY_TILE + k + i] = key;
            }
    }
}

}  // namespace
