#include "team.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// Long enough for what one thread does alone between two phases, short against a step.
std::atomic<int64_t> spin_us{50};

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Something that others change and then tell; whoever waits spins for a while, then sleeps.
class Signal {
public:
    uint32_t now() const { return count_.load(std::memory_order_acquire); }

    void tell() {
        count_.fetch_add(1);
        if (sleepers_.load() == 0) return;
        std::lock_guard<std::mutex> hold(mutex_);
        wake_.notify_all();
    }

    // Until it is another one than `before`. Returns whether it never slept.
    bool wait(uint32_t before, int64_t spin) {
        if (spin > 0 && spin_until_told(before, std::chrono::microseconds(spin))) return true;
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1);  // before the last look, so that one of both sees the other
        wake_.wait(hold, [&] { return count_.load() != before; });
        sleepers_.fetch_sub(1);
        return false;
    }

private:
    bool spin_until_told(uint32_t before, std::chrono::microseconds spin) const {
        auto end = std::chrono::steady_clock::now() + spin;
        do {
            for (int i = 0; i < 32; i++) {
                if (now() != before) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < end);
        return now() != before;
    }

    std::atomic<uint32_t> count_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

class Team {
public:
    std::mutex taken;  // by the caller whose job it is

    void run(int num_threads, TeamFunction function, const void* job) {
        add_workers(num_threads - 1);
        size_ = num_workers_ + 1 < num_threads ? num_workers_ + 1 : num_threads;
        if (size_ > num_counters_) {
            counters_.reset(new Counter[size_]);
            num_counters_ = size_;
        }
        for (int i = 0; i < size_; i++) counters_[i].next = 0;
        function_ = function;
        job_ = job;
        spin_ = spin_us.load(std::memory_order_relaxed);
        patience_.store(bounded(patience_), std::memory_order_relaxed);
        if (size_ > 1) {
            num_left_.store(num_workers_, std::memory_order_relaxed);
            start_.tell();
        }
        Member member = {0, size_, counters_.get()};
        function(job, member);
        if (size_ == 1) return;
        // All have met at the end of the last phase: what is left is their way out.
        for (uint32_t seen = done_.now(); num_left_.load(std::memory_order_acquire) > 0; seen = done_.now())
            done_.wait(seen, patience_.load(std::memory_order_relaxed));
    }

    void meet() {
        uint32_t before = met_.now();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) {
            // Whoever spun in vain spins less from now on: somebody else has the other's core.
            int64_t patience = patience_.load(std::memory_order_relaxed);
            patience = met_.wait(before, patience) ? 2 * patience : patience / 2;
            patience_.store(bounded(patience), std::memory_order_relaxed);
            return;
        }
        for (int i = 0; i < size_; i++) counters_[i].next = 0;
        arrived_.store(0, std::memory_order_relaxed);
        met_.tell();
    }

private:
    // From 1 us to what is allowed, which may be nothing.
    int64_t bounded(int64_t patience) const {
        if (patience < 1) patience = 1;
        return patience < spin_ ? patience : spin_;
    }

    void add_workers(int wanted) {
        try {
            for (; num_workers_ < wanted; num_workers_++)
                std::thread(&Team::work, this, num_workers_ + 1, start_.now()).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: those that there are do the work.
        }
    }

    void work(int index, uint32_t seen) {
        for (;; seen++) {
            start_.wait(seen, 0);
            if (index < size_) function_(job_, Member{index, size_, counters_.get()});
            if (num_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.tell();
        }
    }

    Signal start_, met_, done_;
    std::atomic<int> arrived_{0}, num_left_{0};
    std::unique_ptr<Counter[]> counters_;
    int num_counters_ = 0, num_workers_ = 0, size_ = 0;
    TeamFunction function_ = nullptr;
    const void* job_ = nullptr;
    int64_t spin_ = 0;
    std::atomic<int64_t> patience_{0};  // spun this long at the next meeting
};

// Never destroyed: its threads sleep until the process ends. A forked child has none of them.
Team* team = nullptr;
std::once_flag made;

void make_team() { team = new Team; }

}  // namespace

void set_spin(int64_t microseconds) { spin_us.store(microseconds, std::memory_order_relaxed); }

void meet(const Member& member) {
    if (member.size == 1)
        member.counters[0].next = 0;
    else
        team->meet();
}

void run_team(int num_threads, TeamFunction run, const void* job) {
    if (num_threads > 1) {
        std::call_once(made, [] {
            make_team();
            pthread_atfork(nullptr, nullptr, make_team);
        });
        std::unique_lock<std::mutex> hold(team->taken, std::try_to_lock);
        if (hold) {
            team->run(num_threads, run, job);
            return;
        }
    }
    Counter counter = {0};
    run(job, Member{0, 1, &counter});
}
