// Threads that share out the units of a job; they sleep in between.
//
// Which thread computes a unit never shows in a result. torch has threads of its own, and a process
// with two OpenMP runtimes has each spin against the other: hence these.
#pragma once

#include <cstdint>

using UnitFunction = void (*)(const void* job, int64_t unit);

// Calls run(job, unit) for each of num_units, on up to num_threads threads; returns when all are
// done. The caller works too, and alone where another caller has the threads.
void run_units(int num_threads, int64_t num_units, UnitFunction run, const void* job);
