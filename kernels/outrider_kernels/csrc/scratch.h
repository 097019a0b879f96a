// A thread's own memory, for one unit or job at a time; grows and stays.
#pragma once

#include <cstddef>
#include <cstdlib>

namespace {

struct Scratch {
    float* memory = nullptr;
    size_t size = 0;

    float* of(size_t wanted) {
        if (wanted > size) {
            std::free(memory);
            size = 0;
            void* given = nullptr;
            if (posix_memalign(&given, 64, wanted * sizeof(float)) != 0) std::abort();
            memory = static_cast<float*>(given);
            size = wanted;
        }
        return memory;
    }
    ~Scratch() { std::free(memory); }
};

}  // namespace
