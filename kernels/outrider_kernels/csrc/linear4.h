// Matrix products with weights of nibbles, in groups of inputs, and the rows of linear8.h.
//
// A group of a column has a lowest weight and a step, and its weights are 0 to 15 steps above the
// lowest. So its sum is the step times a sum of whole numbers, and the lowest times what the row's
// group sums up to: two links of the element's chain of multiply-adds.
// outrider_kernels/quantise.py has the same in plain torch.
#pragma once

#include "linear8.h"
#include "nibbles.h"

namespace {

// Of a strip's weights: values of GROUP / 8 times (every column's next four inputs, and in the high
// nibbles the four after them).
struct NibbleGroup {
    uint8_t values[GROUP / 2 * STRIP];
    f16 steps[STRIP], lowest[STRIP];
};
static_assert(sizeof(NibbleGroup) == GROUP / 2 * STRIP + 4 * STRIP, "as Python packs it");

constexpr int NIBBLE_GROUPS_AHEAD = 48;  // as GROUPS_AHEAD

template <int R>
void nibble_rows(const RowGroup* x, int64_t x_stride, const NibbleGroup* strip, int num_groups,
                 float* out) {
    for (int n = 0; n < STRIP_LANES; n += NIBBLE_STEP) {
        Lanes sums[R][NIBBLE_STEP];
        for (int r = 0; r < R; r++)
            for (int m = 0; m < NIBBLE_STEP; m++) sums[r][m] = all(0.0f);
        for (int g = 0; g < num_groups; g++) {
            const NibbleGroup& weights = strip[g];
            const char* ahead = reinterpret_cast<const char*>(strip + g + NIBBLE_GROUPS_AHEAD);
            for (size_t byte = 0; byte < sizeof(NibbleGroup); byte += 64)
                __builtin_prefetch(ahead + byte, 0, SECOND_CACHE);
            NibbleSums whole[R][NIBBLE_STEP];
            for (int r = 0; r < R; r++)
                for (int m = 0; m < NIBBLE_STEP; m++) whole[r][m] = no_products();
            for (int i = 0; i < GROUP; i += 8) {
                NibbleQuads quads[2][NIBBLE_STEP];
                for (int m = 0; m < NIBBLE_STEP; m++)
                    load_nibbles(weights.values + i / 2 * STRIP + 4 * LANES * (n + m), quads[0][m],
                                 quads[1][m]);
                for (int r = 0; r < R; r++)
                    for (int half = 0; half < 2; half++) {
                        int32_t four;
                        std::memcpy(&four, x[r * x_stride + g].values + i + 4 * half, sizeof four);
                        NibbleFactors row = nibble_factors(four);
                        for (int m = 0; m < NIBBLE_STEP; m++)
                            whole[r][m] = add_products(whole[r][m], quads[half][m], row);
                    }
            }
            for (int m = 0; m < NIBBLE_STEP; m++) {
                Lanes steps = load(weights.steps + LANES * (n + m));
                Lanes lowest = load(weights.lowest + LANES * (n + m));
                for (int r = 0; r < R; r++) {
                    const RowGroup& row = x[r * x_stride + g];
                    sums[r][m] = fma(to_lanes(whole[r][m]), steps * all(row.scale), sums[r][m]);
                    sums[r][m] = fma(lowest, all(row.total), sums[r][m]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int m = 0; m < NIBBLE_STEP; m++)
                store(out + r * STRIP + LANES * (n + m), sums[r][m]);
    }
}

struct Nibbles {
    using Group = NibbleGroup;
    static constexpr int ROWS = NIBBLE_ROWS;
    template <int R>
    static constexpr auto rows = nibble_rows<R>;
};

}  // namespace
