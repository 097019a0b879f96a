#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

class Pool {
public:
    void run(int num_threads, int64_t num_units, UnitFunction function, const void* job) {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            function_ = function;
            job_ = job;
            num_units_ = num_units;
            next_.store(0, std::memory_order_relaxed);
            add_workers(num_threads - 1);
            places_ = num_threads - 1;
        }
        for (int i = 1; i < num_threads; i++) wake_.notify_one();
        claim();
        std::unique_lock<std::mutex> hold(mutex_);
        places_ = 0;  // whoever wakes up only now finds nothing to do
        done_.wait(hold, [this] { return num_active_ == 0; });
    }

    std::mutex taken;  // by the caller whose job it is

private:
    void add_workers(int wanted) {
        try {
            for (; num_workers_ < wanted; num_workers_++) std::thread(&Pool::work, this).detach();
        } catch (const std::system_error&) {
            // No more threads to be had: those that there are do the work.
        }
    }

    void claim() {
        for (;;) {
            int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
            if (unit >= num_units_) return;
            function_(job_, unit);
        }
    }

    void work() {
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            wake_.wait(hold, [this] { return places_ > 0; });
            places_--;
            num_active_++;
            hold.unlock();
            claim();
            hold.lock();
            if (--num_active_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    int num_workers_ = 0, places_ = 0, num_active_ = 0;
    UnitFunction function_ = nullptr;
    const void* job_ = nullptr;
    int64_t num_units_ = 0;
    std::atomic<int64_t> next_{0};
};

// Never destroyed: its threads sleep until the process ends. A forked child has none of them.
Pool* pool = nullptr;
std::once_flag made;

void make_pool() { pool = new Pool; }

}  // namespace

void run_units(int num_threads, int64_t num_units, UnitFunction run, const void* job) {
    if (num_threads > num_units) num_threads = static_cast<int>(num_units);
    if (num_threads > 1) {
        std::call_once(made, [] {
            make_pool();
            pthread_atfork(nullptr, nullptr, make_pool);
        });
        std::unique_lock<std::mutex> hold(pool->taken, std::try_to_lock);
        if (hold) {
            pool->run(num_threads, num_units, run, job);
            return;
        }
    }
    for (int64_t unit = 0; unit < num_units; unit++) run(job, unit);
}
