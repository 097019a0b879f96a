// From a checkpoint's matrix to strips of columns, once for each matrix at the start of a service.
//
// In int8 each group of inputs of a column is rounded by its largest, bit for bit as
// outrider_kernels/quantise.py has it; numbers of four inputs of each column stand together.
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t BYTES = GROUP * STRIP;                  // of a group's values
constexpr int64_t GROUP_BYTES = BYTES + 2 * STRIP;        // and a bfloat16 scale for each column
constexpr uint32_t INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;
constexpr uint16_t NOT_A_NUMBER = 0x7FC0;
constexpr float WHOLE = 12582912.0f;  // adding it rounds to a whole number, in the lowest bits

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

float widen(float x) { return x; }
float widen(uint16_t bf16) { return float_of(static_cast<uint32_t>(bf16) << 16); }

// One column's inputs of a group, `count` of them; to[4 * STRIP * q] gets inputs 4 q to 4 q + 3.
template <class T>
void round_group(const T* from, int64_t count, uint8_t* to, uint16_t& scale) {
    float values[GROUP] = {};
    uint32_t most = 0;
    for (int64_t i = 0; i < count; i++) values[i] = widen(from[i]);
    for (int64_t i = 0; i < GROUP; i++) {
        uint32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    // The next bfloat16 that is not smaller, so that nothing clips.
    uint32_t rounded = (bits_of(float_of(most) / 127.0f) + 0xFFFF) >> 16 << 16;
    bool is_finite = most < INFINITE;
    float step = is_finite && rounded ? 1.0f / float_of(rounded) : 0.0f;
    scale = is_finite ? static_cast<uint16_t>(rounded >> 16) : NOT_A_NUMBER;
    uint8_t bytes[GROUP];
    for (int64_t i = 0; i < GROUP; i++) {
        float value = is_finite ? values[i] * step : 0.0f;
        value = value < 127.0f ? value : 127.0f;
        value = value > -127.0f ? value : -127.0f;
        bytes[i] = static_cast<uint8_t>((bits_of(value + WHOLE) & 0xFF) ^ 0x80);
    }
    for (int64_t i = 0; i < GROUP; i += 4) std::memcpy(to + i * STRIP, bytes + i, 4);
}

template <class T>
void round_strip(const PackJob& job, int64_t strip) {
    int64_t num_groups = (job.num_in + GROUP - 1) / GROUP;
    auto to = static_cast<uint8_t*>(job.strips) + strip * num_groups * GROUP_BYTES;
    auto from = static_cast<const T*>(job.weight) + strip * STRIP * job.num_in;
    int64_t num_columns = job.num_out - strip * STRIP;
    for (int64_t c = 0; c < STRIP; c++, from += job.num_in)
        for (int64_t g = 0; g < num_groups; g++) {
            int64_t count = job.num_in - g * GROUP;
            if (c >= num_columns) count = 0;
            uint8_t* group = to + g * GROUP_BYTES;
            uint16_t scale;
            round_group(from + (count ? g * GROUP : 0), count < GROUP ? count : GROUP,
                        group + 4 * c, scale);
            std::memcpy(group + BYTES + 2 * c, &scale, sizeof scale);
        }
}

// The same numbers, columns side by side.
template <class T>
void turn_strip(const PackJob& job, int64_t strip) {
    auto to = static_cast<T*>(job.strips) + strip * STRIP * job.num_in;
    auto from = static_cast<const T*>(job.weight) + strip * STRIP * job.num_in;
    int64_t left = job.num_out - strip * STRIP, num_columns = left < STRIP ? left : STRIP;
    for (int64_t i = 0; i < job.num_in; i++, to += STRIP)
        for (int64_t c = 0; c < STRIP; c++) to[c] = c < num_columns ? from[c * job.num_in + i] : T{};
}

}  // namespace

void pack(const PackJob& job) {
    auto strip_of = job.weight_type == WEIGHT_INT8
                        ? (job.is_bf16 ? round_strip<uint16_t> : round_strip<float>)
                        : (job.is_bf16 ? turn_strip<uint16_t> : turn_strip<float>);
    for (int64_t strip = 0; strip * STRIP < job.num_out; strip++) strip_of(job, strip);
}
