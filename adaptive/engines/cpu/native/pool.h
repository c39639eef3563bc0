// A thread pool in which any free thread takes the next share of the work.
//
// A library for parallel loops gives every thread a fixed part and waits for all threads. If another program occupies a
// core, that wait lasts until the program's time slice ends, in each of the hundred products of a pass: a pass of one
// millisecond takes twenty-five, or five hundred if the threads spin for longer. Here the caller itself does all shares
// that no other thread has begun, and waits only for shares that are in progress. A thread that is not running, or
// asleep, has taken no share.

#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "vectors.h"

namespace {

// Makes a thread that polls leave the core's resources to others for a moment.
inline void pause() {
#if defined(__ARM_NEON)
  __asm__ volatile("isb");  // "yield" takes no time on most processors
#else
  _mm_pause();
#endif
}

// Nanoseconds for which a thread polls for shares before it sleeps, about the time from one pass to the next. Too high:
// other programs lose a core. Too low: every pass has to wake the threads.
constexpr int64_t LOOK = 500000;
// Polls between two readings of the clock; and polls for unfinished shares before the caller yields its core to other
// programs.
constexpr int LOOKS = 64, PATIENT = 2000;

class Pool {
 public:
  // The only pool. It is never destroyed: its threads may still wait in it while the process ends.
  static Pool& only() {
    static Pool* pool = new Pool;
    // A forked child has none of its parent's threads, so it needs a pool of its own.
    static const int followed = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    (void)followed;
    return *pool;
  }

  // Calls body(given, share, shares) for each share. If some of them throw, all are ended first; then one of the
  // exceptions is thrown.
  void run(void (*body)(void*, int, int), void* given, int shares) {
    if (shares <= 1 || taken_.exchange(true, std::memory_order_acquire)) {  // the pool is at work for another caller
      body(given, 0, 1);
      return;
    }
    try {
      for (; threads_ < shares - 1; threads_++) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {  // no memory or no more threads: the existing ones do the work
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
        pause();
      else
        sched_yield();
    }
    std::exception_ptr failure;
    std::swap(failure, failure_);
    taken_.store(false, std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  // A job's number, its number of shares and its next unclaimed share in one word, so that a claim cannot hit another
  // job.
  static uint64_t word(uint64_t job, int shares, int next) { return job << 32 | uint64_t(shares) << 16 | uint64_t(next); }

  static bool has_more(uint64_t state) { return (state & 0xffff) < (state >> 16 & 0xffff); }

  // Claims and does a share; returns whether there was one. The job stays published until its claimed shares are done.
  bool claim_and_do() {
    uint64_t state = state_.load();
    do {
      if (!has_more(state)) return false;
    } while (!state_.compare_exchange_weak(state, state + 1));
    try {
      body_(given_, int(state & 0xffff), int(state >> 16 & 0xffff));
    } catch (...) {  // no memory, as far as known
      std::lock_guard<std::mutex> hold(mutex_);
      failure_ = std::current_exception();
    }
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
          pause();
          found = claim_and_do();
        }
      if (found) continue;
      std::unique_lock<std::mutex> hold(mutex_);
      const uint64_t wakes = wakes_;
      sleeping_.fetch_add(1);
      if (has_more(state_.load())) continue;  // the caller may not have seen `sleeping_`; a needless wake is harmless
      wake_.wait(hold, [&] { return wakes_ != wakes; });
    }
  }

  void (*body_)(void*, int, int) = nullptr;
  void* given_ = nullptr;
  // On separate cache lines, since one is polled while another is written.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> taken_{false};
  uint64_t jobs_ = 0;
  int threads_ = 0;
  std::mutex mutex_;
  std::exception_ptr failure_;
  std::condition_variable wake_;
  uint64_t wakes_ = 0;
};

// Runs part(share, shares) for `threads` shares, on up to as many threads; as a single share if the pool is busy.
template <class Part>
void run(int threads, const Part& part) {
  if (threads <= 1) return part(0, 1);
  Pool::only().run([](void* given, int share, int shares) { (*(const Part*)given)(share, shares); }, (void*)&part, threads);
}

}  // namespace
