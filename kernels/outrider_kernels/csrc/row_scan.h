// A row of logits, and the largest of each part of it: what later passes need not look at.
#pragma once

#include "kernels.h"
#include "lanes.h"

namespace {

constexpr int64_t CHUNK = 256;  // ids
constexpr float INFINITE = __builtin_inff();

// Which lanes of x reach the limit, as bits.
#if defined(__AVX512F__)
INLINE uint32_t at_least(Lanes x, Lanes limit) {
    return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ);
}
INLINE uint32_t not_numbers(Lanes x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q); }
#elif defined(__AVX2__)
INLINE uint32_t bits_of(__m256 low, __m256 high) {
    return static_cast<uint32_t>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
INLINE uint32_t at_least(Lanes x, Lanes limit) {
    return bits_of(_mm256_cmp_ps(x.low, limit.low, _CMP_GE_OQ),
                   _mm256_cmp_ps(x.high, limit.high, _CMP_GE_OQ));
}
INLINE uint32_t not_numbers(Lanes x) {
    return bits_of(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q),
                   _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
}
#else
INLINE uint32_t at_least(Lanes x, Lanes limit) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= uint32_t{x.v[i] >= limit.v[i]} << i;
    return bits;
}
INLINE uint32_t not_numbers(Lanes x) { return ~at_least(x, all(-INFINITE)) & 0xFFFF; }
#endif

struct Row {
    const float* logits;
    int64_t num_ids;
    float* tail;       // [CHUNK]: the last chunk, with banned ids behind it
    float* lane_max;   // [chunks, LANES]: of every 16th id of a chunk
    float* chunk_max;  // [chunks]
    float best, temperature;
    int64_t best_id;  // the lowest one

    int64_t num_chunks() const { return (num_ids + CHUNK - 1) / CHUNK; }
    const float* chunk(int64_t i) const {
        return (i + 1) * CHUNK <= num_ids ? logits + i * CHUNK : tail;
    }
    // logit / temperature, less that of the best: at most 0.
    Lanes scores(const float* x) const { return (load(x) - all(best)) / all(temperature); }
    float score(float logit) const { return (logit - best) / temperature; }
};

// Fills in the maxima; false if there is no finite best logit, or anything is not a number.
INLINE bool scan(Row& row) {
    uint32_t bad = 0;
    row.best = -INFINITE;
    for (int64_t i = 0; i < CHUNK; i++) {
        int64_t id = row.num_ids / CHUNK * CHUNK + i;
        row.tail[i] = id < row.num_ids ? row.logits[id] : -INFINITE;
    }
    for (int64_t chunk = 0; chunk < row.num_chunks(); chunk++) {
        const float* x = row.chunk(chunk);
        Lanes two[2] = {all(-INFINITE), all(-INFINITE)};
        for (int64_t i = 0; i < CHUNK; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                Lanes some = load(x + i + k * LANES);
                bad |= not_numbers(some);
                two[k] = max(some, two[k]);
            }
        Lanes largest = max(two[0], two[1]);
        store(row.lane_max + chunk * LANES, largest);
        row.chunk_max[chunk] = max_of(largest);
        if (row.chunk_max[chunk] > row.best) row.best = row.chunk_max[chunk];
    }
    if (bad || row.best == INFINITE || row.best == -INFINITE) return false;
    int64_t i = 0;
    while (row.chunk_max[i / CHUNK] < row.best) i += CHUNK;
    while (row.logits[i] < row.best) i++;
    row.best_id = i;
    return true;
}

}  // namespace
