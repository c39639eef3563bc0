// How work is shared by threads: a share is done by whoever comes first.
//
// A library for parallel loops gives every thread its part and waits for all of them. Where another program has a core,
// that waits for its turn to end, in each of the hundred products of a pass: a pass of one millisecond takes twenty-five,
// or, where the threads spin for longer, five hundred. Here the caller does what nobody has begun. It waits only for a share that another
// thread is in the midst of; a thread that does not run, or that sleeps, takes none.

#pragma once

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

// Nanoseconds that a thread looks for the next shares before it sleeps: from one pass to the next. Longer takes a core from others,
// shorter has every pass wake it.
constexpr int64_t LOOK = 500000;
// Looks between two readings of the clock, and those at a share that is not done before other programs may have the core.
constexpr int LOOKS = 64, PATIENT = 2000;

class Pool {
 public:
  // The only one, which ends with the process: threads may be waiting in it when everything else is taken down.
  static Pool& only() {
    static Pool* pool = new Pool;
    static const int followed = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });  // a child has none of its parent's threads
    (void)followed;
    return *pool;
  }

  // body(given, share, shares) for each share of so many.
  void run(void (*body)(void*, int, int), void* given, int shares) {
    if (shares <= 1 || taken_.exchange(true, std::memory_order_acquire)) {  // another thread's work is shared already
      body(given, 0, 1);
      return;
    }
    try {
      for (; threads_ < shares - 1; threads_++) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // no more threads are to be had: those that are there do it
    }
    body_ = body, given_ = given;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = ++jobs_;
    state_.store(word(job, shares, 0));
    if (sleeping_.load() && sleeping_.exchange(0)) {
      { std::lock_guard<std::mutex> hold(mutex_); wakes_++; }
      wake_.notify_all();
    }
    while (claim_and_do()) {}
    for (int looks = 0; done_.load(std::memory_order_acquire) < shares; looks++) {
      if (looks < PATIENT)
        _mm_pause();
      else
        sched_yield();
    }
    taken_.store(false, std::memory_order_release);
  }

 private:
  // The number of a job, its shares and the next one that nobody has claimed, so that a claim is of the job that was read.
  static uint64_t word(uint64_t job, int shares, int next) { return job << 32 | uint64_t(shares) << 16 | uint64_t(next); }

  static bool has_more(uint64_t state) { return (state & 0xffff) < (state >> 16 & 0xffff); }

  // Whether there was a share; until it is done its job stays.
  bool claim_and_do() {
    uint64_t state = state_.load();
    do {
      if (!has_more(state)) return false;
    } while (!state_.compare_exchange_weak(state, state + 1));
    body_(given_, int(state & 0xffff), int(state >> 16 & 0xffff));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void serve() {
    for (;;) {
      using Clock = std::chrono::steady_clock;
      const Clock::time_point until = Clock::now() + std::chrono::nanoseconds(LOOK);
      bool found = false;
      while (!found && Clock::now() < until)
        for (int look = 0; !found && look < LOOKS; look++) {
          _mm_pause();
          found = claim_and_do();
        }
      if (found) continue;
      std::unique_lock<std::mutex> hold(mutex_);
      const uint64_t wakes = wakes_;
      sleeping_.fetch_add(1);
      if (has_more(state_.load())) continue;  // who published that may not have seen that this one sleeps; a wake in vain is harmless
      wake_.wait(hold, [&] { return wakes_ != wakes; });
    }
  }

  void (*body_)(void*, int, int) = nullptr;
  void* given_ = nullptr;
  // Apart from each other, since one is looked at while the other is written.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> taken_{false};
  uint64_t jobs_ = 0;
  int threads_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t wakes_ = 0;
};

// Run part(share, shares) for every share of so many, on as many threads where they are free.
template <class Part>
void run(int threads, const Part& part) {
  if (threads <= 1) return part(0, 1);
  Pool::only().run([](void* given, int share, int shares) { (*(const Part*)given)(share, shares); }, (void*)&part, threads);
}

}  // namespace
