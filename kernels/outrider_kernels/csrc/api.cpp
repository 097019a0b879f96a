// The library's functions, for ctypes: plain C, no exception leaves them.
#include <cstring>

#include "kernels.h"
#include "team.h"

namespace {

bool runs_here(const char* isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    bool vnni = !std::strcmp(isa, "avx512vnni");
    if (vnni || !std::strcmp(isa, "avx512"))
        return (!vnni || __builtin_cpu_supports("avx512vnni")) &&
               __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               avx2;
    if (!std::strcmp(isa, "avx2")) return avx2;
#endif
    return !std::strcmp(isa, "generic");
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The kernels, or null where the processor cannot run them.
const Kernels* outrider_kernels() { return runs_here(kernels.name) ? &kernels : nullptr; }

void outrider_linear(const Kernels* kernels, const LinearJob* job) { kernels->linear(job); }
void outrider_attention(const Kernels* kernels, const AttentionJob* job) { kernels->attention(job); }
void outrider_norm(const Kernels* kernels, const NormJob* job) { kernels->norm(job); }
void outrider_silu(const Kernels* kernels, const SiluJob* job) { kernels->silu(job); }
void outrider_rotary(const Kernels* kernels, const RotaryJob* job) { kernels->rotary(job); }
int64_t outrider_pack(const PackJob* job) { return pack(*job); }
void outrider_step(const Kernels* kernels, const StepJob* job) { kernels->step(job); }
void outrider_set_spin(int64_t microseconds) { set_spin(microseconds); }
void outrider_choose(const Kernels* kernels, const ChooseJob* job) { kernels->choose(job); }

}  // extern "C"
#pragma GCC visibility pop
