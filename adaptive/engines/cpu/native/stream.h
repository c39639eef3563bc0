// Weights of layers that do not fit into memory, read from a file while the layers before them compute.
//
// Streamed layers take turns in a few buffers, in the order in which they compute, and begin again with the first behind
// the last: the layers that the next pass starts with are read while this one ends, and while the draft proposes. A
// layer's buffer is always the same, so that its linear layers keep their addresses. Threads read pieces of a layer, several
// at once, past the system's page cache if the file was opened so.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

// What is said where the file could not be read.
struct ReadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a layer is read from and into: `bytes` at `offset` of the file, both multiples of what the disk wants.
struct Section {
  int64_t offset, bytes;
  char* to;
};

class Stream {
 public:
  // `sections` by layer, one without bytes for a layer that stays in memory. `piece`: the bytes of a request, of which so
  // many as there are `readers` are under way at once. `file` stays the caller's.
  Stream(int file, const std::vector<Section>& sections, int64_t piece, int readers) : file_(dup(file)), piece_(piece) {
    for (const Section& section : sections) {
      order_.push_back(section.bytes ? int64_t(streamed_.size()) : -1);
      if (section.bytes) streamed_.push_back(section);
    }
    const int64_t count = int64_t(streamed_.size());
    if (!count || file_ < 0 || piece < 1) throw std::invalid_argument("nothing to read");
    for (int64_t i = 0; i < count; i++) {
      int64_t apart = 1;  // reads since the buffer was used last
      while (streamed_[(i - apart + count) % count].to != streamed_[i].to) apart++;
      apart_.push_back(apart);
      left_.push_back(0);
    }
    for (int i = 0; i < readers; i++) threads_.emplace_back([this] { read(); });
  }

  ~Stream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    room_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    close(file_);
  }

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Before a layer computes: wait until its weights are there. Throws ReadError.
  void wait(int layer) {
    const int64_t wanted = order_[layer], count = int64_t(streamed_.size());
    if (wanted < 0) return;
    std::unique_lock<std::mutex> lock(mutex_);
    // A pass that was broken off left layers that nobody computed.
    while (computed_ % count != wanted) {
      until_read(lock);
      computed_++;
      room_.notify_all();
    }
    until_read(lock);
  }

  // Behind it: another layer may be read into its buffer.
  void done(int layer) {
    if (order_[layer] < 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    computed_++;
    room_.notify_all();
  }

 private:
  // Layers are numbered as they are read, over all passes: `begun_` has pieces that nobody reads yet, from `at_` on.
  void read() {
    const int64_t count = int64_t(streamed_.size());
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      room_.wait(lock, [&] { return ends_ || !error_.empty() || at_ || begun_ - apart_[begun_ % count] < computed_; });
      if (ends_ || !error_.empty()) return;
      const int64_t number = begun_;
      const Section& section = streamed_[number % count];
      const int64_t from = at_, bytes = std::min(piece_, section.bytes - from);
      left_[number % count]++;
      at_ += bytes;
      if (at_ == section.bytes) at_ = 0, begun_++;
      lock.unlock();
      std::string error = fill(section.to + from, section.offset + from, bytes);
      lock.lock();
      left_[number % count]--;
      if (!error.empty()) error_ = std::move(error);
      there_.notify_all();
    }
  }

  std::string fill(char* to, int64_t offset, int64_t bytes) const {
    while (bytes) {
      const ssize_t got = pread(file_, to, size_t(bytes), off_t(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return std::strerror(errno);
      if (!got) return "it is shorter than it was";
      to += got, offset += got, bytes -= got;
    }
    return {};
  }

  // The layer that computes next is read.
  void until_read(std::unique_lock<std::mutex>& lock) {
    const int64_t slot = computed_ % int64_t(streamed_.size());
    there_.wait(lock, [&] { return !error_.empty() || (begun_ > computed_ && !left_[slot]); });
    if (!error_.empty()) throw ReadError("the weights on disk can no longer be read: " + error_);
  }

  const int file_;
  const int64_t piece_;
  std::vector<int64_t> order_;  // by layer, which of those streamed it is; -1 for none
  std::vector<Section> streamed_;
  std::vector<int64_t> apart_;
  std::vector<int> left_;  // requests under way
  int64_t begun_ = 0, at_ = 0, computed_ = 0;
  bool ends_ = false;
  std::string error_;
  std::mutex mutex_;
  std::condition_variable room_, there_;
  std::vector<std::thread> threads_;
};

}  // namespace
