// What tokens weigh, in whole numbers, as mass.py has it: sums are the same in any order.
#pragma once

#include "lanes.h"

namespace {

constexpr float NO_MASS_BELOW = -26.0f;  // a score whose mass is rounded to 0
constexpr float MASS_OF_ONE = 68719476736.0f;  // 2**36

// exp(score) for scores of at most 0, without fused operations.
INLINE Lanes weights_of(Lanes scores) {
    Lanes x = max(all(-126.0f), scores * all(LOG2_E));
    Lanes shifted = x + all(12582912.0f);
    Lanes f = x - (shifted - all(12582912.0f));
    Lanes y = f * all(1.326472731307149e-3f);
    y = y + all(9.671512991189957e-3f);
    y = y * f + all(5.550733581185341e-2f);
    y = y * f + all(2.4022242426872253e-1f);
    y = y * f + all(6.931470036506653e-1f);
    y = y * f + all(1.0f);
    return zero_below(y * power_of_two(shifted), x, -125.0f);
}

INLINE float weight_of(float score) {
    float lanes[LANES];
    store(lanes, weights_of(all(score)));
    return lanes[0];
}

// Weights of at most 1, summed. A double of 1.5 * 2**52 holds no fraction: adding it rounds.
#if defined(__AVX512F__)

struct Mass {
    __m512i low = _mm512_setzero_si512(), high = low;
};
INLINE void add(Mass& mass, Lanes weights) {
    __m512 scaled = _mm512_mul_ps(weights.v, _mm512_set1_ps(MASS_OF_ONE));
    mass.low = _mm512_add_epi64(mass.low, _mm512_cvtps_epi64(_mm512_castps512_ps256(scaled)));
    mass.high = _mm512_add_epi64(mass.high, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(scaled, 1)));
}
INLINE int64_t total(const Mass& mass) {
    alignas(64) int64_t sums[8], out = 0;
    _mm512_store_si512(sums, _mm512_add_epi64(mass.low, mass.high));
    for (int64_t sum : sums) out += sum;
    return out;
}

#elif defined(__AVX2__)

struct Mass {
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
};
INLINE __m256i whole(__m128 scaled) {
    const __m256d rounding = _mm256_set1_pd(6755399441055744.0);
    __m256i bits = _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(scaled), rounding));
    return _mm256_sub_epi64(bits, _mm256_castpd_si256(rounding));
}
INLINE void add(Mass& mass, __m256 weights) {
    __m256 scaled = _mm256_mul_ps(weights, _mm256_set1_ps(MASS_OF_ONE));
    mass.sums[0] = _mm256_add_epi64(mass.sums[0], whole(_mm256_castps256_ps128(scaled)));
    mass.sums[1] = _mm256_add_epi64(mass.sums[1], whole(_mm256_extractf128_ps(scaled, 1)));
}
INLINE void add(Mass& mass, Lanes weights) {
    add(mass, weights.low);
    add(mass, weights.high);
}
INLINE int64_t total(const Mass& mass) {
    int64_t sums[4], out = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), _mm256_add_epi64(mass.sums[0], mass.sums[1]));
    for (int64_t sum : sums) out += sum;
    return out;
}

#else

struct Mass {
    int64_t sum = 0;
};
INLINE void add(Mass& mass, Lanes weights) {
    for (float weight : weights.v) {
        double rounded = static_cast<double>(weight * MASS_OF_ONE) + 6755399441055744.0;
        mass.sum += static_cast<int64_t>(rounded - 6755399441055744.0);
    }
}
INLINE int64_t total(const Mass& mass) { return mass.sum; }

#endif

}  // namespace
