// Threads that go through the phases of a job together; they sleep between jobs.
//
// A job is one function that every member of the team runs. It shares out the units of each phase,
// and meets the others at the phase's end. Which thread computes a unit never shows in a result.
// torch has threads of its own, and a process with two OpenMP runtimes has each spin against the
// other: hence these.
#pragma once

#include <cstdint>

// Units of a phase that a member has begun with its own share; a cache line each.
struct alignas(64) Counter {
    int64_t next;
};

struct Member {
    int index, size;    // in a team of so many
    Counter* counters;  // of each member
};

using TeamFunction = void (*)(const void* job, const Member& member);

// Calls run(job, member) on up to num_threads threads, and returns when all are done. The caller is
// the first member, and the only one where another caller has the threads.
void run_team(int num_threads, TeamFunction run, const void* job);

// Waits until every member is here, and sets the counters to zero.
void meet(const Member& member);

// How long a member that waits for others keeps its core busy at most before it sleeps; 0: not at
// all. Less where that turns out to be in vain.
void set_spin(int64_t microseconds);

namespace {

// Calls f(unit) for each of num_units, all by this team; returns when all are done. A member has a
// range of its own, so that it reads memory from one end to the other, and then helps others.
template <class F>
inline void share(const Member& member, int64_t num_units, F f) {
    for (int i = 0; i < member.size; i++) {
        int owner = (member.index + i) % member.size;
        int64_t end = num_units * (owner + 1) / member.size;
        int64_t begin = num_units * owner / member.size;
        for (;;) {
            int64_t unit = begin + __atomic_fetch_add(&member.counters[owner].next, 1, __ATOMIC_RELAXED);
            if (unit >= end) break;
            f(unit);
        }
    }
    meet(member);
}

}  // namespace
