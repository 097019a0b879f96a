// The kernels for one instruction set: compiled once for each, with ISA its name and the compiler's
// flags for it. Uses no template or inline function of the standard library: the linker would keep
// one copy of it for all sets.
#include "attention.h"
#include "elementwise.h"
#include "kernels.h"
#include "linear8.h"
#include "pool.h"

#define NAME_OF(isa) #isa
#define STRING(isa) NAME_OF(isa)
#define JOIN(a, b) a##b
#define TABLE(isa) JOIN(kernels_, isa)

namespace {

int64_t units(int64_t num_rows) { return (num_rows + ROWS_OF_UNIT - 1) / ROWS_OF_UNIT; }

thread_local Scratch rows_of_job;

int64_t strips(const LinearJob* job) { return (job->num_out + STRIP - 1) / STRIP; }

void linear_int8(const LinearJob* job) {
    int64_t num_groups = (job->num_in + GROUP - 1) / GROUP, stride = num_groups + 1;
    auto x = reinterpret_cast<RowGroup*>(
        rows_of_job.of(job->num_rows * stride * sizeof(RowGroup) / sizeof(float)));
    if (job->x_is_bf16)
        round_rows<bf16>(*job, x, num_groups, stride);
    else
        round_rows<float>(*job, x, num_groups, stride);
    ByteProduct product = {*job, x, num_groups, stride};
    run_units(static_cast<int>(job->num_threads), strips(job), byte_unit, &product);
}

void linear(const LinearJob* job) {
    if (job->weight_type == WEIGHT_INT8) return linear_int8(job);
    // A cache line further apart than they are long: rows of 2**n bytes would share few places in
    // the cache. Whole lanes are written.
    int64_t stride = (job->num_in + LANES - 1) / LANES * LANES + LANES;
    float* x = rows_of_job.of(job->num_rows * stride);
    if (job->x_is_bf16)
        widen_rows<bf16>(*job, x, stride);
    else
        widen_rows<float>(*job, x, stride);
    Product product = {*job, x, stride};
    run_units(static_cast<int>(job->num_threads), strips(job),
              job->weight_type == WEIGHT_BF16 ? linear_unit<bf16> : linear_unit<float>, &product);
}

void attention(const AttentionJob* job) {
    // Padding is finite, whatever stands in its queries.
    int64_t size = job->heads * job->head_dim * (job->is_bf16 ? 2 : 4);
    std::memset(static_cast<char*>(job->out) + job->num_tokens * size, 0,
                (job->num_rows - job->num_tokens) * size);
    run_units(static_cast<int>(job->num_threads), job->num_units,
              job->is_bf16 ? attend_unit<bf16> : attend_unit<float>, job);
}

void norm(const NormJob* job) {
    run_units(static_cast<int>(job->num_threads), units(job->num_rows),
              job->is_bf16 ? norm_unit<bf16> : norm_unit<float>, job);
}

void silu(const SiluJob* job) {
    run_units(static_cast<int>(job->num_threads), units(job->num_rows),
              job->is_bf16 ? silu_unit<bf16> : silu_unit<float>, job);
}

void rotary(const RotaryJob* job) {
    run_units(static_cast<int>(job->num_threads), units(job->num_rows),
              job->is_bf16 ? rotary_unit<bf16> : rotary_unit<float>, job);
}

}  // namespace

extern const Kernels TABLE(ISA);
const Kernels TABLE(ISA) = {STRING(ISA), linear, attention, norm, silu, rotary};
