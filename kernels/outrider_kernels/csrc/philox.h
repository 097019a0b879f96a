// The noise of noise.py, bit for bit: Philox4x32-10 words, and Gumbel noise made from them.
#pragma once

#include "lanes.h"

namespace {

constexpr int64_t WORDS = 64;  // ids whose words are made at a time
constexpr int ROUNDS = 10;

// What a row's noise depends on beside the id.
struct Draws {
    uint64_t keys[ROUNDS][2];  // of 32 bits
    uint32_t position, stream;

    Draws(uint64_t seed, int64_t at, uint32_t of) : position(static_cast<uint32_t>(at)), stream(of) {
        auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
        for (uint32_t i = 0; i < ROUNDS; i++) {
            keys[i][0] = low + i * 0x9E3779B9u;
            keys[i][1] = high + i * 0xBB67AE85u;
        }
    }
};

constexpr uint64_t FIRST_FACTOR = 0xD2511F53, SECOND_FACTOR = 0xCD9E8D57;

// The four words of ids 4 * block to 4 * block + 3.
INLINE void block_of(const Draws& draws, uint32_t block, uint32_t* words) {
    uint32_t a = block, b = draws.position, c = draws.stream, d = 0;
    for (const uint64_t* key : draws.keys) {
        uint64_t first = FIRST_FACTOR * a, second = SECOND_FACTOR * c;
        a = static_cast<uint32_t>((second >> 32) ^ key[0]) ^ b;
        b = static_cast<uint32_t>(second);
        c = static_cast<uint32_t>((first >> 32) ^ key[1]) ^ d;
        d = static_cast<uint32_t>(first);
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

INLINE uint32_t word_of(const Draws& draws, int64_t id) {
    uint32_t words[4];
    block_of(draws, static_cast<uint32_t>(id / 4), words);
    return words[id % 4];
}

// The words of WORDS ids from a multiple of 4 on. In registers each word has 64 bits, of which only
// the low half counts.
#if defined(__AVX512F__)

// In the place of the low one. A shift would need the unit that multiplies.
INLINE __m512i high_half(__m512i x) { return _mm512_shuffle_epi32(x, _MM_PERM_CDAB); }

INLINE void words_of(const Draws& draws, int64_t first_id, uint32_t* words) {
    const __m512i factors[2] = {_mm512_set1_epi64(FIRST_FACTOR), _mm512_set1_epi64(SECOND_FACTOR)};
    const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    __m512i a[2], b[2], c[2], d[2];
    for (int i = 0; i < 2; i++) {
        a[i] = _mm512_add_epi64(_mm512_set1_epi64(first_id / 4 + 8 * i), lane);
        b[i] = _mm512_set1_epi64(draws.position);
        c[i] = _mm512_set1_epi64(draws.stream);
        d[i] = _mm512_setzero_si512();
    }
    for (const uint64_t* key : draws.keys) {
        __m512i keys[2] = {_mm512_set1_epi64(key[0]), _mm512_set1_epi64(key[1])};
        for (int i = 0; i < 2; i++) {
            __m512i first = _mm512_mul_epu32(a[i], factors[0]);
            __m512i second = _mm512_mul_epu32(c[i], factors[1]);
            a[i] = _mm512_ternarylogic_epi64(high_half(second), b[i], keys[0], 0x96);
            b[i] = second;
            c[i] = _mm512_ternarylogic_epi64(high_half(first), d[i], keys[1], 0x96);
            d[i] = first;
        }
    }
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    for (int i = 0; i < 2; i++) {
        __m512i ab = _mm512_mask_blend_epi32(0xAAAA, a[i], _mm512_slli_epi64(b[i], 32));
        __m512i cd = _mm512_mask_blend_epi32(0xAAAA, c[i], _mm512_slli_epi64(d[i], 32));
        _mm512_storeu_si512(words + 32 * i, _mm512_permutex2var_epi64(ab, low, cd));
        _mm512_storeu_si512(words + 32 * i + 16, _mm512_permutex2var_epi64(ab, high, cd));
    }
}

// 16 words as numbers below 2**SIZE, rounded.
constexpr float SIZE = 32.0f;
INLINE Lanes sizes(const uint32_t* words) { return {_mm512_cvtepu32_ps(_mm512_loadu_si512(words))}; }

// A power of two that is at least 2**x and at most 4 * 2**x; something small where x < -125.
INLINE Lanes power_above(Lanes x) {
    return {_mm512_scalef_ps(_mm512_set1_ps(2.0f), x.v)};
}

#elif defined(__AVX2__)

INLINE void words_of(const Draws& draws, int64_t first_id, uint32_t* words) {
    const __m256i factors[2] = {_mm256_set1_epi64x(FIRST_FACTOR), _mm256_set1_epi64x(SECOND_FACTOR)};
    const __m256i lane = _mm256_setr_epi64x(0, 1, 2, 3);
    for (int i = 0; i < 4; i += 2) {
        __m256i a[2], b[2], c[2], d[2];
        for (int k = 0; k < 2; k++) {
            a[k] = _mm256_add_epi64(_mm256_set1_epi64x(first_id / 4 + 4 * (i + k)), lane);
            b[k] = _mm256_set1_epi64x(draws.position);
            c[k] = _mm256_set1_epi64x(draws.stream);
            d[k] = _mm256_setzero_si256();
        }
        for (const uint64_t* key : draws.keys) {
            __m256i keys[2] = {_mm256_set1_epi64x(key[0]), _mm256_set1_epi64x(key[1])};
            for (int k = 0; k < 2; k++) {
                __m256i first = _mm256_mul_epu32(a[k], factors[0]);
                __m256i second = _mm256_mul_epu32(c[k], factors[1]);
                a[k] = _mm256_xor_si256(_mm256_srli_epi64(second, 32), _mm256_xor_si256(b[k], keys[0]));
                b[k] = second;
                c[k] = _mm256_xor_si256(_mm256_srli_epi64(first, 32), _mm256_xor_si256(d[k], keys[1]));
                d[k] = first;
            }
        }
        for (int k = 0; k < 2; k++) {
            __m256i ab = _mm256_blend_epi32(a[k], _mm256_slli_epi64(b[k], 32), 0xAA);
            __m256i cd = _mm256_blend_epi32(c[k], _mm256_slli_epi64(d[k], 32), 0xAA);
            __m256i even = _mm256_unpacklo_epi64(ab, cd), odd = _mm256_unpackhi_epi64(ab, cd);
            auto out = reinterpret_cast<__m256i*>(words + 16 * (i + k));
            _mm256_storeu_si256(out, _mm256_permute2x128_si256(even, odd, 0x20));
            _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(even, odd, 0x31));
        }
    }
}

constexpr float SIZE = 31.0f;  // there are signed conversions only
INLINE __m256 sizes_of_8(const uint32_t* words) {
    __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(eight, 1));
}
INLINE Lanes sizes(const uint32_t* words) { return {sizes_of_8(words), sizes_of_8(words + 8)}; }

#else

INLINE void words_of(const Draws& draws, int64_t first_id, uint32_t* words) {
    for (int64_t i = 0; i < WORDS; i += 4)
        block_of(draws, static_cast<uint32_t>((first_id + i) / 4), words + i);
}

constexpr float SIZE = 32.0f;
INLINE Lanes sizes(const uint32_t* words) { EACH_LANE(static_cast<float>(words[i])); }

#endif

#if !defined(__AVX512F__)
INLINE Lanes power_above(Lanes x) {
    // A number of this size holds no fraction: adding it rounds to a whole number.
    return power_of_two(max(all(-126.0f), x + all(0.5f)) + all(12582912.0f));
}
#endif

// log((1 + f) * 2**exponent). Each operation is rounded on its own, as there.
INLINE float log_of_split(float f, float exponent) {
    float square = f * f;
    float y = f * 7.0376836292e-2f;
    y += -1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f + -1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f + -1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f + -2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y *= f;
    y *= square;
    y += exponent * -2.12194440e-4f;
    y -= square * 0.5f;
    y += f;
    y += exponent * 0.693359375f;
    return y;
}

// log(x) for normal x > 0.
INLINE float fixed_log(float x) {
    auto bits = static_cast<int32_t>(bits_of_float(x));
    auto exponent = static_cast<float>((bits >> 23) - 126);
    float mantissa = float_of_bits((bits & 0x007FFFFF) | 0x3F000000);  // in [1/2, 1)
    if (mantissa < 0.70710677f) {
        mantissa += mantissa;
        exponent -= 1.0f;
    }
    return log_of_split(mantissa - 1.0f, exponent);
}

INLINE float gumbel_of(uint32_t word) {
    float w = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;  // 2**-32
    if (w > 1.0f - 5.9604644775390625e-8f) w = 1.0f - 5.9604644775390625e-8f;
    float exponential = w < 0.29289323f ? -log_of_split(-w, 0.0f) : -fixed_log(1.0f - w);
    return -fixed_log(exponential);
}

}  // namespace
