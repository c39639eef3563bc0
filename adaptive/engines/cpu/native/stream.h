// Reads the weights of layers that do not fit into memory from a file, while the layers before them compute.
//
// Streamed layers share a few buffers. They are read in the order in which they compute, and the first follows the
// last: the first layers of the next pass are read while this pass ends and while the draft proposes. A layer always
// has the same buffer, so that its linear layers keep their addresses. Several threads read pieces of a layer at once,
// past the system's page cache if the file was opened for that. After an error the next wait reads again: a disk that
// was away for a while needs no restart.

#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// The file could not be read.
struct ReadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where a layer is read from and to: `bytes` at `offset` of the file, both multiples of the disk's alignment.
struct Section {
  int64_t offset, bytes;
  char* to;
};

// An open file, closed with the object.
struct File {
  int number;

  ~File() {
    if (number >= 0) close(number);
  }

  // -1 if it is unknown.
  int64_t size() const {
    struct stat found;
    return fstat(number, &found) ? -1 : int64_t(found.st_size);
  }
};

inline std::string contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

class Stream {
 public:
  // `sections` has one section for each layer, without bytes for a layer that stays in memory. `piece`: bytes of a
  // request; `readers`: requests in progress at once. The caller still owns `file`, which is duplicated; it was opened
  // at `path`, whose folder has the manifest too.
  Stream(int file, std::string path, const std::vector<Section>& sections, int64_t piece, int readers)
      : file_{dup(file)}, path_(std::move(path)), folder_(path_.substr(0, path_.rfind('/'))), manifest_(manifest()),
        size_(file_.size()), piece_(piece) {
    for (const Section& section : sections) {
      order_.push_back(section.bytes ? int64_t(streamed_.size()) : -1);
      if (section.bytes) streamed_.push_back(section);
    }
    const int64_t count = int64_t(streamed_.size());
    if (!count || file_.number < 0 || piece < 1) throw std::invalid_argument("nothing to read");
    for (int64_t i = 0; i < count; i++) {
      int64_t apart = 1;  // layers from this one back to the one that used its buffer before
      while (streamed_[(i - apart + count) % count].to != streamed_[i].to) apart++;
      apart_.push_back(apart);
      left_.push_back(0);
    }
    try {
      for (int i = 0; i < readers; i++) threads_.emplace_back([this] { read(); });
    } catch (...) {
      end();
      throw;
    }
  }

  ~Stream() { end(); }

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Waits until a layer's weights have been read; to be called before it computes. Throws ReadError.
  void wait(int layer) {
    const int64_t wanted = order_[layer], count = int64_t(streamed_.size());
    if (wanted < 0) return;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!error_.empty()) read_again(lock, wanted);
    // An interrupted pass leaves layers that were read and not computed: skip them.
    while (computed_ % count != wanted) {
      until_read(lock);
      computed_++;
      room_.notify_all();
    }
    until_read(lock);
  }

  // Releases a layer's buffer for another layer; to be called after it has computed.
  void done(int layer) {
    if (order_[layer] < 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    computed_++;
    room_.notify_all();
  }

 private:
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    room_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Layers are counted over all passes, in the order of reading. Layer `begun_` is unclaimed from byte `at_` on.
  void read() {
    const int64_t count = int64_t(streamed_.size());
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      room_.wait(lock, [&] {
        return ends_ || (error_.empty() && (at_ || begun_ - apart_[begun_ % count] < computed_));
      });
      if (ends_) return;
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
      const ssize_t got = pread(file_.number, to, size_t(bytes), off_t(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return std::strerror(errno) + std::string("; the next answer tries again");
      if (!got) return "it is shorter than it was; end this program and run `adaptive packed delete " + name() + "`";
      to += got, offset += got, bytes -= got;
    }
    return {};
  }

  // Waits until the layer that computes next has been read.
  void until_read(std::unique_lock<std::mutex>& lock) {
    const int64_t slot = computed_ % int64_t(streamed_.size());
    there_.wait(lock, [&] { return !error_.empty() || (begun_ > computed_ && !left_[slot]); });
    if (!error_.empty()) throw ReadError("the weights in " + path_ + " can no longer be read: " + error_);
  }

  // Lets the readers begin anew with the streamed layer `wanted`.
  void read_again(std::unique_lock<std::mutex>& lock, int64_t wanted) {
    there_.wait(lock, [&] { return std::all_of(left_.begin(), left_.end(), [](int left) { return !left; }); });
    reopen();
    while (computed_ % int64_t(streamed_.size()) != wanted) computed_++;
    begun_ = computed_, at_ = 0;
    error_.clear();
    room_.notify_all();
  }

  // Takes the file that is now at the path if it holds the same weights: the descriptor of a disk that was away stays
  // unreadable when the disk is back. To be called while no request is in progress.
  void reopen() {
    File found{open(path_.c_str(), fcntl(file_.number, F_GETFL) | O_CLOEXEC)};
    if (found.number >= 0 && found.size() == size_ && manifest() == manifest_) std::swap(file_.number, found.number);
  }

  std::string manifest() const { return contents(folder_ + "/manifest.json"); }

  std::string name() const { return folder_.substr(folder_.rfind('/') + 1); }

  File file_;
  const std::string path_, folder_, manifest_;
  const int64_t size_, piece_;
  std::vector<int64_t> order_;  // by layer, its number among the streamed layers; -1 for a layer in memory
  std::vector<Section> streamed_;
  std::vector<int64_t> apart_;
  std::vector<int> left_;  // requests in progress, by streamed layer
  int64_t begun_ = 0, at_ = 0, computed_ = 0;
  bool ends_ = false;
  std::string error_;
  std::mutex mutex_;
  std::condition_variable room_, there_;
  std::vector<std::thread> threads_;
};

}  // namespace
