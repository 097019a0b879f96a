// Products of bytes, summed in whole numbers: exact, so the same with every instruction set.
//
// Four products at a time go into each of 16 sums: of four weights of one column, which lie together
// as 0 to 255 and stand for that minus 128, and of four of a row, -127 to 127, shared by all columns.
#pragma once

#include "lanes.h"

namespace {

#if defined(__AVX512VNNI__)

constexpr int BYTE_ROWS = 8;  // of 2 are 16 whole sums, and as many float32; 32 registers
constexpr int BYTE_STEP = 2;

struct Ints {
    __m512i v;
};
using Quads = __m512i;
using Factors = __m512i;

INLINE Ints all_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE Quads load_quads(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE Factors factors(int32_t four) { return _mm512_set1_epi32(four); }
INLINE Ints add_products(Ints sums, Quads weights, Factors row) {
    return {_mm512_dpbusd_epi32(sums.v, weights, row)};
}

#elif defined(__AVX512BW__)

constexpr int BYTE_ROWS = 6;
constexpr int BYTE_STEP = 1;

struct Ints {
    __m512i v;
};
struct Quads {
    __m512i even, odd;
};
using Factors = Quads;

INLINE Ints all_ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE Quads load_quads(const uint8_t* p) {
    __m512i four = _mm512_loadu_si512(p);
    return {_mm512_and_si512(four, _mm512_set1_epi16(0xFF)), _mm512_srli_epi16(four, 8)};
}
INLINE Factors factors(int32_t four) {
    __m512i both = _mm512_set1_epi32(four);
    return {_mm512_srai_epi16(_mm512_slli_epi16(both, 8), 8), _mm512_srai_epi16(both, 8)};
}
INLINE Ints add_products(Ints sums, Quads weights, Factors row) {
    __m512i even = _mm512_madd_epi16(weights.even, row.even);
    __m512i odd = _mm512_madd_epi16(weights.odd, row.odd);
    return {_mm512_add_epi32(sums.v, _mm512_add_epi32(even, odd))};
}

#elif defined(__AVX2__)

constexpr int BYTE_ROWS = 4;  // of 2 registers are 8 sums; 16 registers
constexpr int BYTE_STEP = 1;

struct Ints {
    __m256i low, high;
};
struct Quads {
    __m256i even[2], odd[2];
};
struct Factors {
    __m256i even, odd;
};

INLINE Ints all_ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Quads load_quads(const uint8_t* p) {
    Quads out;
    for (int i = 0; i < 2; i++) {
        __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        out.even[i] = _mm256_and_si256(four, _mm256_set1_epi16(0xFF));
        out.odd[i] = _mm256_srli_epi16(four, 8);
    }
    return out;
}
INLINE Factors factors(int32_t four) {
    __m256i both = _mm256_set1_epi32(four);
    return {_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), _mm256_srai_epi16(both, 8)};
}
INLINE __m256i products(const Quads& weights, int i, Factors row) {
    return _mm256_add_epi32(_mm256_madd_epi16(weights.even[i], row.even),
                            _mm256_madd_epi16(weights.odd[i], row.odd));
}
INLINE Ints add_products(Ints sums, Quads weights, Factors row) {
    return {_mm256_add_epi32(sums.low, products(weights, 0, row)),
            _mm256_add_epi32(sums.high, products(weights, 1, row))};
}

#else

constexpr int BYTE_ROWS = 4;
constexpr int BYTE_STEP = 1;

struct Ints {
    int32_t v[LANES];
};
using Quads = const uint8_t*;
struct Factors {
    int8_t v[4];
};

INLINE Ints all_ints(int32_t x) {
    Ints out;
    for (int i = 0; i < LANES; i++) out.v[i] = x;
    return out;
}
INLINE Quads load_quads(const uint8_t* p) { return p; }
INLINE Factors factors(int32_t four) {
    Factors out;
    std::memcpy(out.v, &four, sizeof four);
    return out;
}
INLINE Ints add_products(Ints sums, Quads weights, Factors row) {
    for (int i = 0; i < LANES; i++)
        for (int k = 0; k < 4; k++) sums.v[i] += int32_t{weights[4 * i + k]} * row.v[k];
    return sums;
}

#endif

#if defined(__AVX512F__)
INLINE Lanes to_lanes(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
#elif defined(__AVX2__)
INLINE Lanes to_lanes(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
#else
INLINE Lanes to_lanes(Ints a) { EACH_LANE(static_cast<float>(a.v[i])); }
#endif

// A number of this size holds no fraction: adding it rounds to a whole number, which then stands in
// the lowest bits.
constexpr float WHOLE = 12582912.0f;

INLINE void store_bytes(int8_t* p, Lanes shifted) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted.v)));
#else
    float wide[LANES];
    store(wide, shifted);
    for (int i = 0; i < LANES; i++) p[i] = static_cast<int8_t>(bits_of_float(wide[i]) & 0xFF);
#endif
}

}  // namespace
