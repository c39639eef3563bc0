// Texts of token ids, and what followed the longest suffix of one in them. The plain twin is drafting/suffixes.py.
//
// Tokens lie in segments. In each, for every order (a number of tokens), a table of chains: from a hash of the tokens before
// a position to the latest such position, and from there to the one before it. Appending is a stack's push, and what was
// appended last is taken back exactly. What a chain leads to is compared token by token, so a hash that means two things costs
// time and never a wrong match. A segment never grows: adding does not stop to build tables anew, and the oldest texts go by
// whole segments.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr int ORDERS[] = {2, 4, 8, 16};
constexpr int KINDS = 4;
// Tokens that two contexts are compared by at most, which the beginning of a segment repeats of the one before.
constexpr int LONGEST = 32;
// Tokens that are proposed at most, matches that are looked at, and entries of a chain that may be no match.
constexpr int AHEAD = 16, MATCHES = 16, FAILURES = 64;
// Tokens of the first segment and of the largest.
constexpr int64_t SMALLEST = 1 << 12, LARGEST = 1 << 20;
constexpr int32_t NO_TOKEN = -1;
// Tokens ahead of the one that is appended whose places in the tables are asked for: nearly every one is a miss of the caches,
// and so many are waited for together.
constexpr int EARLY = 8;
// Bytes from which on an array lies in large pages, of which the processor's table holds all that a lookup needs.
constexpr size_t LARGE_PAGE = size_t(2) << 20;

// By length of a match, which grows with every token that is proposed, and by how far matches agree: the bin of a token.
constexpr int LENGTHS = 8, AGREEMENTS = 5;
// Probability that all tokens so far are accepted, below which a continuation ends.
constexpr double LEAST_REACH = 0.01;

inline int length_bin(int length) {
  return length < 4 ? 0 : length < 6 ? 1 : length < 8 ? 2 : length < 12 ? 3 : length < 16 ? 4 : length < 24 ? 5 : length < 32 ? 6 : 7;
}

inline int agreement_bin(int agreeing, int all) {
  if (all == 1) return 2;
  if (agreeing == all) return all < 4 ? 3 : 4;
  return 2 * agreeing < all ? 0 : 1;
}

template <class T>
struct Array {  // of plain numbers, which the system gives only where they are written
  T* data;
  explicit Array(int64_t count) : data(static_cast<T*>(std::calloc(count, sizeof(T)))) {
    if (!data) throw std::bad_alloc();
#ifdef __linux__
    const uintptr_t begin = (uintptr_t(data) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    const uintptr_t end = uintptr_t(data + count) / LARGE_PAGE * LARGE_PAGE;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: never mind the answer
#endif
  }
  ~Array() { std::free(data); }
  Array(const Array&) = delete;
  T& operator[](int64_t i) { return data[i]; }
  const T& operator[](int64_t i) const { return data[i]; }
};

// For each order a hash of as many tokens before `end`; how many orders there are tokens for.
inline int hashes(const int32_t* end, uint64_t* found) {
  uint64_t hash = 0;
  int kind = 0;
  for (int n = 1; kind < KINDS; n++) {
    const int32_t token = end[-n];
    if (token == NO_TOKEN) break;
    hash = (hash ^ (uint64_t(uint32_t(token)) + 1)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
    if (n == ORDERS[kind]) found[kind++] = hash * 0xD6E8FEB86659FD93ull;
  }
  return kind;
}

struct Segment {
  const int64_t number, capacity;
  const int shift;
  int64_t size = 1;  // position 0 is before every text, and means none in a chain
  int repeated = 0;  // tokens from position 1 on that stand at the end of the segment before too
  bool continued = false;  // the next segment goes on with the last text of this one
  Array<int32_t> tokens, latest, earlier;

  static int bits(int64_t capacity) {
    int n = 0;
    while ((int64_t(1) << n) < capacity) n++;
    return n;
  }

  Segment(int64_t number, int64_t wanted)
      : number(number), capacity(int64_t(1) << bits(wanted)), shift(64 - bits(wanted)), tokens(capacity + 1),
        latest(KINDS * capacity), earlier(KINDS * capacity) {
    tokens[0] = tokens[1] = NO_TOKEN;
  }

  int64_t nbytes() const { return 4 * (capacity + 1 + 2 * KINDS * capacity); }

  // Where in the tables what this hash stands for is.
  int64_t place(uint64_t hash, int kind) const { return KINDS * int64_t(hash >> shift) + kind; }

  bool full() const { return size >= capacity; }

  void push(int32_t token) { push(&token, 1); }

  // As many of these as there is room for, and how many.
  int64_t push(const int32_t* some, int64_t count) {
    count = std::min(count, capacity - size);
    std::copy(some, some + count, tokens.data + size);
    tokens[size + count] = NO_TOKEN;
    uint64_t before[EARLY][KINDS];
    int kinds[EARLY];
    for (int64_t i = 0; i < count + EARLY; i++) {
      const int slot = int(i % EARLY);
      if (const int64_t position = size + i - EARLY; i >= EARLY) {
        for (int kind = 0; kind < kinds[slot]; kind++) {
          int32_t& last = latest[place(before[slot][kind], kind)];
          earlier[KINDS * position + kind] = last;
          last = int32_t(position);
        }
      }
      if (i >= count) continue;
      const int32_t* here = tokens.data + size + i;
      kinds[slot] = *here == NO_TOKEN ? 0 : hashes(here, before[slot]);
      for (int kind = 0; kind < kinds[slot]; kind++) __builtin_prefetch(&latest[place(before[slot][kind], kind)], 1);
    }
    size += count;
    return count;
  }

  void pop() {
    uint64_t before[KINDS];
    size--;
    const int kinds = tokens[size] == NO_TOKEN ? 0 : hashes(tokens.data + size, before);
    for (int kind = 0; kind < kinds; kind++) latest[place(before[kind], kind)] = earlier[KINDS * size + kind];
    tokens[size] = NO_TOKEN;
  }
};

// What follows: at most AHEAD tokens, and the bin of each.
struct Continuation {
  int count = 0;
  int32_t tokens[AHEAD];
  int32_t bins[AHEAD];
};

class Suffixes {
 public:
  // Segments have at most `largest` tokens; the oldest are dropped where there would be more than `most` tokens (0: never).
  Suffixes(int64_t most, int64_t largest) : most(most), largest(largest) {}

  // A text begins; what is appended belongs to it. Its id serves to remove it.
  void begin(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex);
    begin_text(id);
  }

  void append(const int32_t* tokens, int64_t count) {
    std::lock_guard<std::mutex> lock(mutex);
    append_tokens(tokens, count);
  }

  void add(int64_t id, const int32_t* tokens, int64_t count) {
    std::lock_guard<std::mutex> lock(mutex);
    begin_text(id);
    append_tokens(tokens, count);
  }

  // Take the last `count` tokens of the last text back.
  void take_back(int64_t count) {
    std::lock_guard<std::mutex> lock(mutex);
    while (count > 0 && !segments.empty()) {
      Segment& last = *segments.back();
      if (last.size == 1 + last.repeated && last.repeated) {
        segments.pop_back();
        next--;  // `of` finds a segment by its number
        pieces.pop_back();
        if (!segments.empty()) segments.back()->continued = false;
        continue;
      }
      if (last.size == 1) return;
      last.pop();
      pieces.back().end = last.size;
      held--;
      count--;
    }
  }

  // Forget the texts with these ids (sorted): their tokens are overwritten.
  int64_t remove(const int64_t* ids, int64_t count) {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t removed = 0;
    auto doomed = [&](const Piece& piece) { return std::binary_search(ids, ids + count, piece.id); };
    for (const Piece& piece : pieces) {
      if (!doomed(piece)) continue;
      Segment* segment = of(piece.segment);
      std::fill(segment->tokens.data + piece.begin, segment->tokens.data + piece.end, NO_TOKEN);
      held -= tokens_of(piece);
      removed++;
    }
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), doomed), pieces.end());
    while (segments.size() > 1 && (pieces.empty() || pieces.front().segment > segments.front()->number))
      segments.erase(segments.begin());
    return removed;
  }

  // What followed the longest suffix of `context`, whose end is at `end`. `grows`: the context is what was appended last, and
  // goes on with what is proposed. Nothing while another thread adds.
  Continuation follow(const int32_t* begin, const int32_t* end, bool grows) {
    Continuation found;
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (!lock || segments.empty()) return found;
    int32_t tail[LONGEST + 1];
    const int known = int(std::min<int64_t>(LONGEST, end - begin));
    tail[0] = NO_TOKEN;  // nothing is equal to what is before the context
    std::copy(end - known, end, tail + 1);
    Match matches[MATCHES];
    int count = 0;
    uint64_t before[KINDS];
    const int kinds = hashes(tail + 1 + known, before);
    for (const auto& segment : segments)  // all at once rather than one after the other
      for (int kind = 0; kind < kinds; kind++) __builtin_prefetch(&segment->latest[segment->place(before[kind], kind)]);
    for (int kind = kinds - 1; kind >= 0 && !count; kind--) {
      int failures = 0;
      for (auto s = segments.rbegin(); s != segments.rend() && count < MATCHES && failures < FAILURES; ++s) {
        Segment& segment = **s;
        for (int32_t p = segment.latest[segment.place(before[kind], kind)]; p && count < MATCHES && failures < FAILURES;
             p = segment.earlier[KINDS * int64_t(p) + kind]) {
          int same = 0;
          const int32_t* a = segment.tokens.data + p;
          const int32_t* b = tail + 1 + known;
          while (same < known && a[-1 - same] == b[-1 - same]) same++;
          if (same < ORDERS[kind] || *a == NO_TOKEN) {
            failures++;
            continue;
          }
          matches[count++] = {&segment, p, same};
        }
      }
    }
    if (count) vote(matches, count, grows, found);
    return found;
  }

  // The same of the end of the last text of an index.
  Continuation follow_end(Suffixes& of) {
    int32_t end[LONGEST];
    const int count = of.end_of_text(end);
    return follow(end + LONGEST - count, end + LONGEST, &of == this);
  }

  int64_t nbytes() {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t sum = int64_t(pieces.capacity() * sizeof(Piece));
    for (const auto& segment : segments) sum += segment->nbytes();
    return sum;
  }

  int64_t length() {
    std::lock_guard<std::mutex> lock(mutex);
    return held;
  }

 private:
  struct Piece {  // of a text, within one segment
    int64_t id, segment, begin, end;
  };
  struct Match {
    const Segment* segment;
    int64_t position;
    int length;  // 0 for one that does not agree any more
  };

  std::mutex mutex;
  std::vector<std::unique_ptr<Segment>> segments;
  std::vector<Piece> pieces;
  const int64_t most, largest;
  int64_t held = 0, next = 0;

  // The last tokens of the last text, at the end of LONGEST numbers; how many there are. All lie in the last segment.
  int end_of_text(int32_t* found) {
    std::lock_guard<std::mutex> lock(mutex);
    int count = 0;
    if (segments.empty()) return count;
    const Segment& last = *segments.back();
    for (int32_t token; count < LONGEST && (token = last.tokens[last.size - 1 - count]) != NO_TOKEN; count++)
      found[LONGEST - 1 - count] = token;
    return count;
  }

  Segment* of(int64_t number) { return segments[number - segments.front()->number].get(); }

  int64_t tokens_of(const Piece& piece) {
    return piece.end - piece.begin - (piece.begin == 1 ? of(piece.segment)->repeated : 0);
  }

  void begin_text(int64_t id) {
    Segment& segment = room();
    if (segment.size > 1) segment.push(NO_TOKEN);
    Segment& now = room();
    pieces.push_back({id, now.number, now.size, now.size});
  }

  Segment& room() {
    if (segments.empty() || segments.back()->full()) {
      segments.push_back(std::make_unique<Segment>(next, std::min(largest, std::max(std::min(SMALLEST, largest), held))));
      next++;  // not before: without memory there is no segment of that number
    }
    return *segments.back();
  }

  void append_tokens(const int32_t* tokens, int64_t count) {
    if (pieces.empty()) begin_text(-1);
    while (count > 0) {
      if (segments.back()->full()) go_on();
      Segment& segment = *segments.back();
      const int64_t pushed = segment.push(tokens, count);
      pieces.back().end = segment.size;
      held += pushed;
      tokens += pushed;
      count -= pushed;
    }
    while (most && held > most && segments.size() > 1) drop();
  }

  // The last text goes on in a new segment, which repeats its last tokens: whatever follows has its context there.
  void go_on() {
    Segment& before = *segments.back();
    before.continued = true;
    const Piece piece = pieces.back();
    Segment& segment = room();
    int repeated = 0;
    while (repeated < LONGEST && before.tokens[before.size - 1 - repeated] != NO_TOKEN) repeated++;
    for (int i = repeated; i > 0; i--) segment.tokens[segment.size++] = before.tokens[before.size - i];
    segment.tokens[segment.size] = NO_TOKEN;
    segment.repeated = repeated;
    pieces.push_back({piece.id, segment.number, 1, segment.size});
  }

  void drop() {
    const int64_t number = segments.front()->number;
    for (const Piece& piece : pieces)
      if (piece.segment == number) held -= tokens_of(piece);
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), [&](const Piece& p) { return p.segment == number; }), pieces.end());
    segments.erase(segments.begin());
  }

  // The token `ahead` of a match; of the text that grows, what is proposed itself behind its end.
  int32_t token_of(const Match& match, int ahead, bool grows, const Continuation& found) {
    const Segment* segment = match.segment;
    int64_t position = match.position + ahead;
    while (position >= segment->size) {
      position -= segment->size;
      const bool last = segment == segments.back().get();
      if (last) return grows && position < found.count ? found.tokens[position] : NO_TOKEN;
      if (!segment->continued) return NO_TOKEN;
      segment = of(segment->number + 1);
      position += 1 + segment->repeated;
    }
    return segment->tokens[position];
  }

  // Token by token what most of the longest matches say, the latest where as many say another; who said another is out.
  void vote(Match* matches, int count, bool grows, Continuation& found) {
    while (found.count < AHEAD) {
      int32_t said[MATCHES];
      int all = 0, longest = 0;
      for (int i = 0; i < count; i++) {
        if (!matches[i].length) continue;
        said[i] = token_of(matches[i], found.count, grows, found);
        if (said[i] == NO_TOKEN) {
          matches[i].length = 0;
          continue;
        }
        all++;
        longest = std::max(longest, matches[i].length);
      }
      if (!all) return;
      int best = -1, votes = 0;
      for (int i = 0; i < count; i++) {
        if (matches[i].length != longest) continue;
        int same = 0;
        for (int j = 0; j < count; j++) same += matches[j].length == longest && said[j] == said[i];
        if (same > votes) best = i, votes = same;
      }
      const int32_t token = said[best];
      int agreeing = 0;
      for (int i = 0; i < count; i++) {
        if (!matches[i].length) continue;
        if (said[i] == token) agreeing++;
        else matches[i].length = 0;
      }
      found.bins[found.count] = agreement_bin(agreeing, all) * LENGTHS + length_bin(longest + found.count);
      found.tokens[found.count++] = token;
    }
  }
};

}  // namespace
