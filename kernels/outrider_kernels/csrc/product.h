// Products with weights of any type: what a row has to become first, and what becomes of the sums.
//
// This and sums.cpp are the places that tell types of weights apart.
#pragma once

#include "elementwise.h"
#include "linear4.h"
#include "units.h"

namespace {

constexpr int MOST_GROUP_ROWS = NIBBLE_ROWS > BYTE_ROWS ? NIBBLE_ROWS : BYTE_ROWS;
constexpr int MOST_ROWS = STRIP_ROWS > MOST_GROUP_ROWS ? STRIP_ROWS : MOST_GROUP_ROWS;

INLINE bool is_in_groups(const Weight& weight) {
    return weight.type == WEIGHT_INT8 || weight.type == WEIGHT_INT4;
}

INLINE int64_t num_strips(int64_t num_out) { return (num_out + STRIP - 1) / STRIP; }

// Rows whose sums are computed together.
INLINE int rows_at_once(const Weight& weight) {
    return weight.type == WEIGHT_INT4 ? NIBBLE_ROWS : weight.type == WEIGHT_INT8 ? BYTE_ROWS : STRIP_ROWS;
}

// Bytes of a row of inputs. Somewhat more than it takes, so that rows of 2**n bytes do not share few
// places in the cache, and so that whole strips can be written.
INLINE int64_t input_stride(const Weight& weight) {
    if (is_in_groups(weight))
        return ((weight.num_in + GROUP - 1) / GROUP + 1) * static_cast<int64_t>(sizeof(RowGroup));
    return ((weight.num_in + LANES - 1) / LANES + 1) * LANES * static_cast<int64_t>(sizeof(float));
}

// Values `begin` to `begin + count` of a row of inputs; begin is a multiple of GROUP.
INLINE void put_inputs(const Weight& weight, const float* values, int64_t begin, int64_t count,
                       const Inputs& to, int64_t row) {
    if (is_in_groups(weight)) {
        round_row(values, count, to.row<RowGroup>(row) + begin / GROUP);
        return;
    }
    float* out = to.row<float>(row) + begin;
    each_lanes(count, [&](int64_t i, int n) INLINE_LAMBDA { store(out + i, load_some(values + i, n)); });
}

// A column of the matrix: num_in values.
void lookup(const Weight& weight, int64_t column, float* out) {
    int64_t strip = column / STRIP, place = column % STRIP;
    for (int64_t i = 0; i < weight.num_in; i++) {
        int64_t value = (strip * weight.num_in + i) * STRIP + place;
        if (weight.type == WEIGHT_FLOAT32) {
            out[i] = static_cast<const float*>(weight.data)[value];
        } else if (weight.type == WEIGHT_BF16) {
            out[i] = to_float(static_cast<const bf16*>(weight.data)[value]);
        } else {
            int64_t num_groups = (weight.num_in + GROUP - 1) / GROUP;
            // A table is never of nibbles.
            auto group = static_cast<const WeightGroup*>(weight.data) + strip * num_groups + i / GROUP;
            int shifted = group->values[(i % GROUP / 4 * STRIP + place) * 4 + i % 4];
            out[i] = static_cast<float>(shifted - 128) * to_float(group->scales[place]);
        }
    }
}

// Calls f(first row, number of rows, their sums in this strip).
template <class F>
INLINE void each_block(const Weight& weight, const Inputs& x, int64_t num_rows, int64_t strip, F f) {
    alignas(64) float sums[MOST_ROWS * STRIP];
    int most = rows_at_once(weight);
    for (int64_t row = 0; row < num_rows; row += most) {
        int count = static_cast<int>(num_rows - row < most ? num_rows - row : most);
        sums_of(weight, x, row, count, strip, sums);
        f(row, count, sums);
    }
}

// out[num_rows, num_out] = x @ weight + bias, or is added to; one strip of columns.
template <bool ADD>
void product_strip(const Weight& weight, const Inputs& x, int64_t num_rows, int64_t strip, float* out) {
    int64_t column = strip * STRIP;
    int64_t num_columns = weight.num_out - column < STRIP ? weight.num_out - column : STRIP;
    each_block(weight, x, num_rows, strip, [&](int64_t row, int count, const float* sums) INLINE_LAMBDA {
        for (int r = 0; r < count; r++) {
            float* to = out + (row + r) * weight.num_out + column;
            each_lanes(num_columns, [&](int64_t i, int n) INLINE_LAMBDA {
                Lanes values = load(sums + r * STRIP + i);
                if (weight.bias) values = values + load_some(weight.bias + column + i, n);
                if (ADD) values = values + load_some(to + i, n);
                store_some(to + i, values, n);
            });
        }
    });
}

// silu(gate) * up of one strip of gates, as inputs of the next product. `weight` has all gates, then
// as many ups; these may begin within a strip.
void gated_strip(const Weight& weight, const Inputs& x, int64_t num_rows, int64_t strip,
                 const Weight& next, const Inputs& out) {
    int64_t column = strip * STRIP, width = weight.num_out / 2, up_column = width + column;
    int64_t num_columns = width - column < STRIP ? width - column : STRIP, shift = up_column % STRIP;
    each_block(weight, x, num_rows, strip, [&](int64_t row, int count, const float* gates) INLINE_LAMBDA {
        alignas(64) float ups[2][MOST_ROWS * STRIP];
        sums_of(weight, x, row, count, up_column / STRIP, ups[0]);
        bool is_cut = shift + num_columns > STRIP;
        if (is_cut) sums_of(weight, x, row, count, up_column / STRIP + 1, ups[1]);
        for (int r = 0; r < count; r++) {
            alignas(64) float up_row[2 * STRIP + LANES] = {}, values[STRIP];
            std::memcpy(up_row, ups[0] + r * STRIP, sizeof values);
            if (is_cut) std::memcpy(up_row + STRIP, ups[1] + r * STRIP, sizeof values);
            each_lanes(num_columns, [&](int64_t i, int n) INLINE_LAMBDA {
                Lanes gate = load(gates + r * STRIP + i), up = load(up_row + shift + i);
                if (weight.bias) {
                    gate = gate + load_some(weight.bias + column + i, n);
                    up = up + load_some(weight.bias + up_column + i, n);
                }
                store(values + i, silu(gate, up));
            });
            put_inputs(next, values, column, num_columns, out, row + r);
        }
    });
}

}  // namespace
