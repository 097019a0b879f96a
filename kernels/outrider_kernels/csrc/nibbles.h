// Products of nibbles by bytes, summed in whole numbers: exact, so the same with every instruction set.
//
// As bytes.h, four products at a time into each of 16 sums, of weights from 0 to 15. 64 bytes hold
// two lots of them: the low nibbles are every column's four inputs, the high ones its next four.
#pragma once

#include "bytes.h"
#include "kernels.h"

namespace {

// Sums of half a group fit into 16 bits, so where there is no instruction for four products at once
// they stay there until the group is over.
static_assert(15 * 127 * GROUP / 2 < 1 << 15, "sums of pairs");

#if defined(__AVX512VNNI__)

constexpr int NIBBLE_ROWS = BYTE_ROWS;
constexpr int NIBBLE_STEP = BYTE_STEP;

using NibbleQuads = Quads;
using NibbleFactors = Factors;
using NibbleSums = Ints;

INLINE NibbleSums no_products() { return all_ints(0); }
INLINE NibbleFactors nibble_factors(int32_t four) { return factors(four); }

#elif defined(__AVX512BW__)

constexpr int NIBBLE_ROWS = 8;
constexpr int NIBBLE_STEP = 2;

using NibbleQuads = __m512i;
using NibbleFactors = __m512i;
struct NibbleSums {
    __m512i pairs;
};

INLINE NibbleSums no_products() { return {_mm512_setzero_si512()}; }
INLINE NibbleFactors nibble_factors(int32_t four) { return _mm512_set1_epi32(four); }
INLINE NibbleSums add_products(NibbleSums sums, NibbleQuads weights, NibbleFactors row) {
    return {_mm512_add_epi16(sums.pairs, _mm512_maddubs_epi16(weights, row))};
}
INLINE Lanes to_lanes(NibbleSums a) {
    return {_mm512_cvtepi32_ps(_mm512_madd_epi16(a.pairs, _mm512_set1_epi16(1)))};
}

#elif defined(__AVX2__)

constexpr int NIBBLE_ROWS = 4;  // of 2 registers are 8 sums; 16 registers
constexpr int NIBBLE_STEP = 1;

struct NibbleQuads {
    __m256i v[2];
};
using NibbleFactors = __m256i;
struct NibbleSums {
    __m256i pairs[2];
};

INLINE NibbleSums no_products() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
INLINE NibbleFactors nibble_factors(int32_t four) { return _mm256_set1_epi32(four); }
INLINE NibbleSums add_products(NibbleSums sums, NibbleQuads weights, NibbleFactors row) {
    for (int i = 0; i < 2; i++)
        sums.pairs[i] = _mm256_add_epi16(sums.pairs[i], _mm256_maddubs_epi16(weights.v[i], row));
    return sums;
}
INLINE __m256 to_lanes(__m256i pairs) {
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE Lanes to_lanes(NibbleSums a) { return {to_lanes(a.pairs[0]), to_lanes(a.pairs[1])}; }

#else

constexpr int NIBBLE_ROWS = BYTE_ROWS;
constexpr int NIBBLE_STEP = BYTE_STEP;

struct NibbleQuads {
    uint8_t v[4 * LANES];
};
using NibbleFactors = Factors;
using NibbleSums = Ints;

INLINE NibbleSums no_products() { return all_ints(0); }
INLINE NibbleFactors nibble_factors(int32_t four) { return factors(four); }
INLINE NibbleSums add_products(NibbleSums sums, const NibbleQuads& weights, NibbleFactors row) {
    return add_products(sums, Quads{weights.v}, row);
}

#endif

// 64 bytes: two lots of every column's four inputs.
INLINE void load_nibbles(const uint8_t* p, NibbleQuads& first, NibbleQuads& second) {
#if defined(__AVX512F__)
    __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi32(0x0F0F0F0F);
    first = _mm512_and_si512(both, mask);
    second = _mm512_and_si512(_mm512_srli_epi32(both, 4), mask);
#elif defined(__AVX2__)
    __m256i mask = _mm256_set1_epi32(0x0F0F0F0F);
    for (int i = 0; i < 2; i++) {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
        first.v[i] = _mm256_and_si256(both, mask);
        second.v[i] = _mm256_and_si256(_mm256_srli_epi32(both, 4), mask);
    }
#else
    for (int i = 0; i < 4 * LANES; i++) {
        first.v[i] = p[i] & 15;
        second.v[i] = p[i] >> 4;
    }
#endif
}

}  // namespace
