// Matrix products with weights and rows of bytes, in groups of inputs that each have a scale.
//
// Within a group sums are whole numbers; over the groups an element is one chain of multiply-adds in
// their order. A row is rounded to bytes by its own values alone, so rows do not feel each other.
// outrider_kernels/quantise.py has the same in plain torch.
#pragma once

#include "bytes.h"
#include "linear.h"

namespace {

// Of a row.
struct RowGroup {
    int8_t values[GROUP];
    float scale;
    int32_t start;  // of the sums: takes back that weights are stored 128 too large
    float total;    // of the values, times the scale: what goes with a weight's lowest, in int4
};

// Of a strip's weights: values of GROUP / 4 times (every column's next four inputs).
struct WeightGroup {
    uint8_t values[GROUP * STRIP];
    bf16 scales[STRIP];
};
static_assert(sizeof(WeightGroup) == GROUP * STRIP + 2 * STRIP, "as Python packs it");

// Groups whose weights are asked for ahead of their use, as in linear.h, but into the second cache:
// so many do not fit into the first one beside the rows, and fewer come too late for several rows.
constexpr int GROUPS_AHEAD = 32;

INLINE void round_group(const float* x, int count, RowGroup& out) {
    constexpr int PARTS = GROUP / LANES;
    Lanes values[PARTS], most = all(0.0f), spoilt = all(0.0f);
    for (int i = 0; i < PARTS; i++) {
        int left = count - i * LANES;
        values[i] = left >= LANES ? load(x + i * LANES)
                                  : left > 0 ? load_first(x + i * LANES, left) : all(0.0f);
        most = max(most, max(values[i], all(0.0f) - values[i]));
        spoilt = spoilt + (values[i] - values[i]);  // NaN if there is no number
    }
    float largest = max_of(most);
    bool is_zero = !(largest > 1e-30f);
    Lanes inverse = all(is_zero ? 0.0f : 127.0f / largest), total = all(0.0f);
    for (int i = 0; i < PARTS; i++) {
        Lanes shifted = values[i] * inverse + all(WHOLE);
        store_bytes(out.values + i * LANES, shifted);
        total = total + (shifted - all(WHOLE));
    }
    float no_number = sum(spoilt), whole = sum(total);
    out.scale = (is_zero ? 0.0f : largest / 127.0f) + no_number;
    out.start = no_number == 0.0f ? -128 * static_cast<int32_t>(whole) : 0;
    out.total = (no_number == 0.0f ? whole : 0.0f) * out.scale;
}

void round_row(const float* x, int64_t num_in, RowGroup* to) {
    for (int64_t i = 0; i < num_in; i += GROUP)
        round_group(x + i, static_cast<int>(num_in - i < GROUP ? num_in - i : GROUP), *to++);
}

template <int R>
void byte_rows(const RowGroup* x, int64_t x_stride, const WeightGroup* strip, int num_groups,
               float* out) {
    for (int n = 0; n < STRIP_LANES; n += BYTE_STEP) {
        Lanes sums[R][BYTE_STEP];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < BYTE_STEP; m++) sums[r][m] = all(0.0f);
        for (int g = 0; g < num_groups; g++) {
            const WeightGroup& weights = strip[g];
            const char* ahead = reinterpret_cast<const char*>(strip + g + GROUPS_AHEAD);
            for (size_t byte = 0; byte < sizeof(WeightGroup); byte += 64)
                __builtin_prefetch(ahead + byte, 0, SECOND_CACHE);
            Ints whole[R][BYTE_STEP];
            for (int r = 0; r < R; r++)
                for (int m = 0; m < BYTE_STEP; m++) whole[r][m] = all_ints(x[r * x_stride + g].start);
            for (int i = 0; i < GROUP; i += 4) {
                Quads quads[BYTE_STEP];
                for (int m = 0; m < BYTE_STEP; m++)
                    quads[m] = load_quads(weights.values + i * STRIP + 4 * LANES * (n + m));
                for (int r = 0; r < R; r++) {
                    int32_t four;
                    std::memcpy(&four, x[r * x_stride + g].values + i, sizeof four);
                    Factors row = factors(four);
                    for (int m = 0; m < BYTE_STEP; m++)
                        whole[r][m] = add_products(whole[r][m], quads[m], row);
                }
            }
            for (int m = 0; m < BYTE_STEP; m++) {
                Lanes scales = load(weights.scales + LANES * (n + m));
                for (int r = 0; r < R; r++)
                    sums[r][m] = fma(to_lanes(whole[r][m]), scales * all(x[r * x_stride + g].scale),
                                     sums[r][m]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < BYTE_STEP; m++) store(out + r * STRIP + LANES * (n + m), sums[r][m]);
    }
}

// What a product in groups needs to know of its weights.
struct Bytes {
    using Group = WeightGroup;
    static constexpr int ROWS = BYTE_ROWS;
    template <int R>
    static constexpr auto rows = byte_rows<R>;
};

template <class W, int R>
struct GroupTable : GroupTable<W, R - 1> {
    GroupTable() { this->functions[R] = W::template rows<R>; }
};
template <class W>
struct GroupTable<W, 0> {
    void (*functions[W::ROWS + 1])(const RowGroup*, int64_t, const typename W::Group*, int, float*);
};

template <class W>
void group_sums(const RowGroup* x, int64_t x_stride, const typename W::Group* strip, int num_groups,
                int count, float* sums) {
    static const GroupTable<W, W::ROWS> table;
    table.functions[count](x, x_stride, strip, num_groups, sums);
}

}  // namespace
