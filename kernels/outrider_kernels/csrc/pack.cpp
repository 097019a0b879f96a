// From a checkpoint's matrix to strips of columns, once for each matrix at the start of a service.
//
// In int8 each group of inputs of a column is rounded by its largest, in int4 between its ends, bit
// for bit as outrider_kernels/quantise.py has it; numbers of four inputs of each column stand
// together, in int4 with the next four in the high nibbles.
#if defined(__GNUC__) && !defined(__clang__)
// Else gcc keeps comparisons of numbers apart, for exceptions that nobody reads, and makes no vectors
// of them: the same bits in half the time. clang does so anyway.
#pragma GCC optimize("no-trapping-math")
#endif
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

constexpr uint32_t INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;
constexpr uint16_t BF16_NAN = 0x7FC0, F16_NAN = 0x7E00, F16_INFINITE = 0x7C00;
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

// x as a T has it; bfloat16 to nearest, ties to even.
template <class T>
float rounded_to(float x) {
    return x;
}
template <>
float rounded_to<uint16_t>(float x) {
    uint32_t bits = bits_of(x);
    return float_of((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16);
}

float clamp(float x, float low, float high) {
    x = x < high ? x : high;
    return x > low ? x : low;
}

// A float16's bits: to nearest, ties to even.
uint16_t narrow(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & MAGNITUDE;
    if (size >= 0x477FF000) return static_cast<uint16_t>(sign | F16_INFINITE);
    if (size < 0x38800000)  // below 2**-14, in steps of 2**-24
        return static_cast<uint16_t>(sign | (bits_of(float_of(size) * 0x1p24f + WHOLE) & 0x7FF));
    return static_cast<uint16_t>(sign | ((size + 0xFFF + (size >> 13 & 1)) - 0x38000000) >> 13);
}

// Of a finite one.
float widen_f16(uint16_t f16) {
    float size = f16 & 0x7C00 ? float_of(((f16 & 0x7FFFu) << 13) + 0x38000000)
                              : static_cast<float>(f16 & 0x3FF) * 0x1p-24f;
    return f16 & 0x8000 ? -size : size;
}

// To a column's place in a group: to[4 * STRIP * q] gets inputs 4 q to 4 q + 3; behind the values of
// all columns come their scales. `round` says whether every number, rounded to T, comes out as it
// was; in int8, where nobody asks, that it does not.
struct Int8 {
    static constexpr int64_t BYTES = GROUP * STRIP, GROUP_BYTES = BYTES + 2 * STRIP;
    template <class T>
    static bool round(const float* values, int64_t count, uint8_t* group, int64_t column);
};

struct Int4 {
    static constexpr int64_t BYTES = GROUP / 2 * STRIP, GROUP_BYTES = BYTES + 4 * STRIP;
    template <class T>
    static bool round(const float* values, int64_t count, uint8_t* group, int64_t column);
};

// Values after `count` are zero.
template <class T>
bool Int8::round(const float* values, int64_t, uint8_t* group, int64_t column) {
    uint32_t most = 0;
    for (int64_t i = 0; i < GROUP; i++) {
        uint32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        most = magnitude > most ? magnitude : most;
    }
    // The next bfloat16 that is not smaller, so that nothing clips.
    uint32_t rounded = (bits_of(float_of(most) / 127.0f) + 0xFFFF) >> 16 << 16;
    bool is_finite = most < INFINITE;
    float step = is_finite && rounded ? 1.0f / float_of(rounded) : 0.0f;
    uint16_t scale = is_finite ? static_cast<uint16_t>(rounded >> 16) : BF16_NAN;
    uint8_t bytes[GROUP];
    for (int64_t i = 0; i < GROUP; i++) {
        // The inverse of a tiny scale is infinite, and zero times that is no number.
        float steps = is_finite && values[i] != 0.0f ? values[i] * step : 0.0f;
        float value = clamp(steps, -127.0f, 127.0f);
        bytes[i] = static_cast<uint8_t>((bits_of(value + WHOLE) & 0xFF) ^ 0x80);
    }
    for (int64_t i = 0; i < GROUP; i += 4)
        std::memcpy(group + i * STRIP + 4 * column, bytes + i, 4);
    std::memcpy(group + BYTES + 2 * column, &scale, sizeof scale);
    return false;
}

// Values after `count` do not matter: they are as the last one.
template <class T>
bool Int4::round(const float* given, int64_t count, uint8_t* group, int64_t column) {
    float values[GROUP], least = given[0], most = given[0];
    for (int64_t i = 0; i < GROUP; i++) values[i] = given[i < count || !count ? i : count - 1];
    bool is_number = true;
    for (int64_t i = 0; i < GROUP; i++) {
        least = values[i] < least ? values[i] : least;
        most = values[i] > most ? values[i] : most;
        is_number &= (bits_of(values[i]) & MAGNITUDE) < INFINITE;
    }
    uint16_t step = narrow((most - least) / 15.0f), lowest = narrow(least + 0.0f);
    is_number &= (step & F16_INFINITE) != F16_INFINITE && (lowest & F16_INFINITE) != F16_INFINITE;
    step = is_number ? step : 0;
    lowest = is_number ? lowest : F16_NAN;
    float begin = is_number ? widen_f16(lowest) : 0.0f, width = widen_f16(step);
    float inverse = step ? 1.0f / width : 0.0f;
    uint32_t nibbles[GROUP], num_others = 0;
    for (int64_t i = 0; i < GROUP; i++) {
        float value = clamp(is_number ? (values[i] - begin) * inverse : 0.0f, 0.0f, 15.0f);
        nibbles[i] = bits_of(value + WHOLE) & 15;
        float whole = value + WHOLE - WHOLE;
        num_others += rounded_to<T>(begin + whole * width) != values[i];
    }
    for (int64_t i = 0; i < GROUP; i += 8)
        for (int64_t k = 0; k < 4; k++)
            group[i / 2 * STRIP + 4 * column + k] =
                static_cast<uint8_t>(nibbles[i + k] | nibbles[i + 4 + k] << 4);
    std::memcpy(group + BYTES + 2 * column, &step, sizeof step);
    std::memcpy(group + BYTES + 2 * STRIP + 2 * column, &lowest, sizeof lowest);
    return num_others == 0;  // NaN is never as it was
}

template <class R, class T>
bool round_strip(const PackJob& job, int64_t strip) {
    int64_t num_groups = (job.num_in + GROUP - 1) / GROUP;
    auto to = static_cast<uint8_t*>(job.strips) + strip * num_groups * R::GROUP_BYTES;
    auto from = static_cast<const T*>(job.weight) + strip * STRIP * job.num_in;
    int64_t num_columns = job.num_out - strip * STRIP;
    bool is_exact = true;
    for (int64_t c = 0; c < STRIP; c++, from += job.num_in)
        for (int64_t g = 0; g < num_groups; g++) {
            int64_t count = job.num_in - g * GROUP;
            if (c >= num_columns) count = 0;
            count = count < GROUP ? count : GROUP;
            float values[GROUP] = {};
            for (int64_t i = 0; i < count; i++) values[i] = widen(from[g * GROUP + i]);
            is_exact &= R::template round<T>(values, count, to + g * R::GROUP_BYTES, c);
        }
    return is_exact;
}

// The same numbers, columns side by side.
template <class T>
bool turn_strip(const PackJob& job, int64_t strip) {
    auto to = static_cast<T*>(job.strips) + strip * STRIP * job.num_in;
    auto from = static_cast<const T*>(job.weight) + strip * STRIP * job.num_in;
    int64_t left = job.num_out - strip * STRIP, num_columns = left < STRIP ? left : STRIP;
    for (int64_t i = 0; i < job.num_in; i++, to += STRIP)
        for (int64_t c = 0; c < STRIP; c++) to[c] = c < num_columns ? from[c * job.num_in + i] : T{};
    return true;
}

}  // namespace

bool pack(const PackJob& job) {
    bool (*strip_of)(const PackJob&, int64_t);
    if (job.weight_type == WEIGHT_INT8)
        strip_of = job.is_bf16 ? round_strip<Int8, uint16_t> : round_strip<Int8, float>;
    else if (job.weight_type == WEIGHT_INT4)
        strip_of = job.is_bf16 ? round_strip<Int4, uint16_t> : round_strip<Int4, float>;
    else
        strip_of = job.is_bf16 ? turn_strip<uint16_t> : turn_strip<float>;
    for (int64_t strip = 0; strip * STRIP < job.num_out; strip++)
        if (!strip_of(job, strip) && job.only_exact) return false;
    return true;
}
