// The kernels for one instruction set, with ISA its name and the compiler's flags for it.
#include "decoder.h"

#define NAME_OF(isa) #isa
#define STRING(isa) NAME_OF(isa)

namespace {

thread_local Scratch memory_of_job;

// Calls work(job, unit) for each unit, by a team.
template <class Job, class Work>
void run_units(const Job& job, int64_t num_units, Work work) {
    struct Units {
        const Job& job;
        int64_t num_units;
        Work work;
    } units = {job, num_units, work};
    run_team(
        static_cast<int>(job.num_threads),
        [](const void* given, const Member& member) {
            const Units& all = *static_cast<const Units*>(given);
            share(member, all.num_units, [&](int64_t unit) { all.work(all.job, unit); });
        },
        &units);
}

void linear(const LinearJob* job) {
    Inputs x = {nullptr, input_stride(job->weight)};
    x.data = reinterpret_cast<char*>(memory_of_job.of(job->num_rows * x.stride / sizeof(float)));
    int64_t num_in = job->weight.num_in;
    run_units(*job, job->num_rows, [=](const LinearJob& all, int64_t row) {
        put_inputs(all.weight, all.x + row * num_in, 0, num_in, x, row);
    });
    run_units(*job, num_strips(job->weight.num_out), [=](const LinearJob& all, int64_t strip) {
        product_strip<false>(all.weight, x, all.num_rows, strip, all.out);
    });
}

void attention(const AttentionJob* job) {
    run_units(*job, job->plan.num_units, [](const AttentionJob& all, int64_t i) { attend(all, i); });
}

void norm(const NormJob* job) {
    run_units(*job, job->num_rows * job->parts, [](const NormJob& all, int64_t i) {
        const float* weight = all.weight + i % all.parts * all.width;
        norm_row(all.x + i * all.width, weight, all.width, all.eps, all.out + i * all.width);
    });
}

void silu_mul(const SiluJob* job) {
    run_units(*job, job->num_rows, [](const SiluJob& all, int64_t row) {
        const float* gate = all.gate_up + row * 2 * all.width;
        float* out = all.out + row * all.width;
        each_lanes(all.width, [&](int64_t i, int n) INLINE_LAMBDA {
            Lanes up = load_some(gate + all.width + i, n);
            store_some(out + i, silu(load_some(gate + i, n), up), n);
        });
    });
}

void rotary(const RotaryJob* job) {
    run_units(*job, job->num_rows, [](const RotaryJob& all, int64_t row) { rotate(all, row); });
}

struct PreparedStep {
    const StepJob& step;
    Workspace space;
};

void step(const StepJob* job) {
    PreparedStep prepared = {*job, workspace_of(*job, memory_of_job)};
    run_team(
        static_cast<int>(job->num_threads),
        [](const void* given, const Member& member) {
            const PreparedStep& all = *static_cast<const PreparedStep*>(given);
            Pass{all.step, all.space, member}.run();
        },
        &prepared);
}

void choose(const ChooseJob* job) {
    run_units(*job, job->num_choices, [](const ChooseJob& all, int64_t i) { choose_tokens(all.choices[i]); });
}

}  // namespace

const Kernels kernels = {STRING(ISA), linear, attention, norm, silu_mul, rotary, step, choose};
