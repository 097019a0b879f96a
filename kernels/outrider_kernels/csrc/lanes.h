// Sixteen float32 side by side, the same arithmetic with every instruction set.
//
// Included by the files that are compiled for an instruction set; everything here is static, so that
// it never gets linked into those that must run on any processor. Where the processor
// has a fused multiply-add, all results have the same bits whatever the width of its registers:
// sums over lanes have one order, and nothing is left to the compiler (-ffp-contract=off).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
constexpr int CACHE_LINE = 64;   // bytes
constexpr int SECOND_CACHE = 2;  // where __builtin_prefetch puts what it asks for

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

INLINE float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return float_of_bits(uint32_t{x.bits} << 16); }
INLINE float to_float(int8_t x) { return static_cast<float>(x); }
INLINE float to_float(f16 x) {
    uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7FFF;
    if (rest >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest >= 0x0400) return float_of_bits(sign | ((rest << 13) + ((127 - 15) << 23)));
    float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2**-24, the least there is
    return sign ? -small : small;
}

INLINE void from_float(float x, float& out) { out = x; }
INLINE void from_float(float x, bf16& out) {
    // To nearest, ties to even, as torch does; NaN stays NaN.
    uint32_t bits = bits_of_float(x);
    out.bits = x != x ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int GEMM_LANES = 4;  // 6 rows of 4 are 24 sums; 32 registers

struct Lanes {
    __m512 v;
};

INLINE Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE Lanes load(const bf16* p) {
    __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
}
INLINE Lanes load(const int8_t* p) {
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow))};
}
INLINE Lanes load(const f16* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
INLINE void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
INLINE Lanes all(float x) { return {_mm512_set1_ps(x)}; }
INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
// The second one where either is NaN.
INLINE Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
// The first n lanes of a, and `rest` in the others.
INLINE Lanes keep_first(Lanes a, int n, Lanes rest) {
    auto mask = static_cast<__mmask16>(n >= LANES ? 0xFFFF : (1u << n) - 1);
    return {_mm512_mask_blend_ps(mask, rest.v, a.v)};
}
INLINE Lanes zero_below(Lanes a, Lanes x, float limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}
// 2**n for the whole number n that was added to 1.5 * 2**23.
INLINE Lanes power_of_two(Lanes shifted) {
    __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(0x4B400000 - 127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}
INLINE __m128 sum_quarters(Lanes a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
INLINE __m128 max_quarters(Lanes a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
    return _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int GEMM_LANES = 1;  // 6 rows of 2 registers are 12 sums; 16 registers

struct Lanes {
    __m256 low, high;
};

INLINE Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 widen(const bf16* p) {
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}
INLINE __m256 widen(const int8_t* p) {
    __m128i narrow = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(narrow));
}
INLINE Lanes load(const bf16* p) { return {widen(p), widen(p + 8)}; }
INLINE Lanes load(const int8_t* p) { return {widen(p), widen(p + 8)}; }
INLINE __m256 widen(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE Lanes load(const f16* p) { return {widen(p), widen(p + 8)}; }
INLINE void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
INLINE Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Lanes operator+(Lanes a, Lanes b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
INLINE Lanes operator-(Lanes a, Lanes b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
INLINE Lanes operator*(Lanes a, Lanes b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
INLINE Lanes operator/(Lanes a, Lanes b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
INLINE Lanes max(Lanes a, Lanes b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
INLINE Lanes min(Lanes a, Lanes b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
INLINE __m256 keep_first(__m256 a, int n, __m256 rest) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
    return _mm256_blendv_ps(rest, a, _mm256_castsi256_ps(kept));
}
INLINE Lanes keep_first(Lanes a, int n, Lanes rest) {
    return {keep_first(a.low, n, rest.low), keep_first(a.high, n - 8, rest.high)};
}
INLINE Lanes zero_below(Lanes a, Lanes x, float limit) {
    __m256 edge = _mm256_set1_ps(limit);
    return {_mm256_and_ps(a.low, _mm256_cmp_ps(x.low, edge, _CMP_NLT_UQ)),
            _mm256_and_ps(a.high, _mm256_cmp_ps(x.high, edge, _CMP_NLT_UQ))};
}
INLINE __m256 power_of_two(__m256 shifted) {
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4B400000 - 127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
INLINE Lanes power_of_two(Lanes shifted) {
    return {power_of_two(shifted.low), power_of_two(shifted.high)};
}
INLINE __m128 sum_quarters(Lanes a) {
    __m256 eight = _mm256_add_ps(a.low, a.high);
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
INLINE __m128 max_quarters(Lanes a) {
    __m256 eight = _mm256_max_ps(a.low, a.high);
    return _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

#else

constexpr int GEMM_LANES = 1;

struct Lanes {
    float v[LANES];
};

#define EACH_LANE(expression)                   \
    Lanes out;                                  \
    for (int i = 0; i < LANES; i++) out.v[i] = (expression); \
    return out

template <class T>
INLINE Lanes load(const T* p) { EACH_LANE(to_float(p[i])); }
INLINE void store(float* p, Lanes a) { std::memcpy(p, a.v, sizeof a.v); }
INLINE Lanes all(float x) { EACH_LANE(x); }
INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__FP_FAST_FMAF)
    EACH_LANE(__builtin_fmaf(a.v[i], b.v[i], c.v[i]));
#else
    EACH_LANE(a.v[i] * b.v[i] + c.v[i]);  // rounded twice: other bits than the other sets
#endif
}
INLINE Lanes operator+(Lanes a, Lanes b) { EACH_LANE(a.v[i] + b.v[i]); }
INLINE Lanes operator-(Lanes a, Lanes b) { EACH_LANE(a.v[i] - b.v[i]); }
INLINE Lanes operator*(Lanes a, Lanes b) { EACH_LANE(a.v[i] * b.v[i]); }
INLINE Lanes operator/(Lanes a, Lanes b) { EACH_LANE(a.v[i] / b.v[i]); }
INLINE Lanes max(Lanes a, Lanes b) { EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE Lanes min(Lanes a, Lanes b) { EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE Lanes keep_first(Lanes a, int n, Lanes rest) { EACH_LANE(i < n ? a.v[i] : rest.v[i]); }
INLINE Lanes zero_below(Lanes a, Lanes x, float limit) { EACH_LANE(x.v[i] < limit ? 0.0f : a.v[i]); }
INLINE Lanes power_of_two(Lanes shifted) {
    EACH_LANE(float_of_bits((bits_of_float(shifted.v[i]) - (0x4B400000 - 127)) << 23));
}
INLINE float sum(Lanes a) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a.v[i] = a.v[i] + a.v[i + width];
    return a.v[0];
}
INLINE float max_of(Lanes a) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
}

#endif

#if defined(__AVX512F__) || defined(__AVX2__)
// Lane i with lane i + 8, then + 4, + 2, + 1.
INLINE float sum(Lanes a) {
    __m128 four = sum_quarters(a);
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float max_of(Lanes a) {
    __m128 four = max_quarters(a);
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#endif

INLINE void store(bf16* p, Lanes a) {
    float wide[LANES];
    store(wide, a);
    for (int i = 0; i < LANES; i++) from_float(wide[i], p[i]);
}

// n < 16 values, and zeros.
template <class T>
INLINE Lanes load_first(const T* p, int n) {
    float padded[LANES] = {};
    for (int i = 0; i < n; i++) padded[i] = to_float(p[i]);
    return load(padded);
}

// All 16, or the first n values and zeros; n may be less than nothing.
template <class T>
INLINE Lanes load_up_to(const T* p, int n) {
    return n >= LANES ? load(p) : n > 0 ? load_first(p, n) : all(0.0f);
}

template <class T>
INLINE void store_first(T* p, Lanes a, int n) {
    float wide[LANES];
    store(wide, a);
    for (int i = 0; i < n; i++) from_float(wide[i], p[i]);
}

// 2**x: exactly 1 for 0, zero below -125, as from 127 above it, NaN for NaN; else within 1e-7.
INLINE Lanes exp2(Lanes x) {
    x = min(all(127.0f), x);
    // A number of this size holds no fraction: adding it rounds to a whole number.
    Lanes shifted = max(all(-126.0f), x) + all(12582912.0f);
    Lanes f = x - (shifted - all(12582912.0f));
    Lanes p = all(1.5353360504377633e-4f);  // near 2**f on [-1/2, 1/2], and exact at 0
    p = fma(p, f, all(1.3398875016719103e-3f));
    p = fma(p, f, all(9.61843691766262e-3f));
    p = fma(p, f, all(5.5503323674201965e-2f));
    p = fma(p, f, all(2.4022647738456726e-1f));
    p = fma(p, f, all(6.931471824645996e-1f));
    p = fma(p, f, all(1.0f));
    return zero_below(p * power_of_two(shifted), x, -125.0f);
}

constexpr float LOG2_E = 1.44269504088896341f;

}  // namespace
