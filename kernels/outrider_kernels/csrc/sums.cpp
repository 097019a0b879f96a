// Sums of a strip of weights of any type.
#include "linear4.h"
#include "units.h"

namespace {

template <class W>
void float_sums(const Weight& weight, const Inputs& x, int64_t row, int count, int64_t strip,
                float* sums) {
    strip_sums<W>(x.row<float>(row), x.stride / static_cast<int64_t>(sizeof(float)),
                  static_cast<const W*>(weight.data) + strip * weight.num_in * STRIP,
                  static_cast<int>(weight.num_in), count, sums);
}

template <class W>
void rounded_sums(const Weight& weight, const Inputs& x, int64_t row, int count, int64_t strip,
                  float* sums) {
    int64_t num_groups = (weight.num_in + GROUP - 1) / GROUP;
    group_sums<W>(x.row<RowGroup>(row), x.stride / static_cast<int64_t>(sizeof(RowGroup)),
                  static_cast<const typename W::Group*>(weight.data) + strip * num_groups,
                  static_cast<int>(num_groups), count, sums);
}

}  // namespace

void sums_of(const Weight& weight, const Inputs& x, int64_t row, int count, int64_t strip, float* sums) {
    if (weight.type == WEIGHT_FLOAT32) return float_sums<float>(weight, x, row, count, strip, sums);
    if (weight.type == WEIGHT_BF16) return float_sums<bf16>(weight, x, row, count, strip, sums);
    if (weight.type == WEIGHT_INT8) return rounded_sums<Bytes>(weight, x, row, count, strip, sums);
    rounded_sums<Nibbles>(weight, x, row, count, strip, sums);
}
