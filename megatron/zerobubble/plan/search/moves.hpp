// The moves of annealing, which change an order a little, and their random numbers.
//
// A move takes rows (per rank a string of op codes, see core.py) and gives the changed ones with their ranks, none if nothing
// changes. The result may deadlock; scoring detects that.

#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace zerobubble {

// Share of single moves that take an op on the critical path, because no other single move shortens it.
constexpr double kCriticalShare = 0.7;
// Share of reassignments that move one microbatch to another slot, and those between by one, instead of swapping two.
constexpr double kRotateShare = 0.3;

using Row = std::vector<char>;
using Order = std::vector<Row>;
using Changes = std::vector<std::pair<int, Row>>;
using Critical = std::vector<std::pair<int, int>>;

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15ull;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  // Uniform in [0, 1).
  double unit() { return static_cast<double>(bits() >> 11) * (1.0 / 9007199254740992.0); }
  // Uniform in 0..limit-1.
  int below(int limit) { return static_cast<int>(bits() % static_cast<std::uint64_t>(limit)); }

 private:
  std::uint64_t state_;
};

class Moves {
 public:
  Moves(int num_microbatches, std::vector<int> chunks)
      : m_(num_microbatches), p_(static_cast<int>(chunks.size())), chunks_(std::move(chunks)) {}

  // Set another patience for some ranks.
  void vary_patience(std::vector<double>& patience, Random& random) const {
    const auto [first, last] = some_ranks(random);
    const double value = random.unit() * 1.5;
    for (int rank = first; rank <= last; ++rank) patience[rank] = value;
  }

  // Move one op a few steps earlier or later.
  void single_move(const Order& rows, const Critical& critical, Random& random, Changes& changed) const {
    int rank, source;
    if (random.unit() < kCriticalShare) {
      std::tie(rank, source) = critical[random.below(static_cast<int>(critical.size()))];
    } else {
      rank = random.below(p_);
      source = random.below(static_cast<int>(rows[rank].size()));
    }
    const Row& row = rows[rank];
    const int length = static_cast<int>(row.size());
    const double scale = random.unit();
    const int distance = 1 + static_cast<int>(scale * scale * scale * (3 * chunks_[rank] + 6));
    const int target = random.below(2) ? source + distance : source - distance;
    if (target < 0 || target >= length) return;
    Row moved = row;
    if (source < target) {
      std::rotate(moved.begin() + source, moved.begin() + source + 1, moved.begin() + target + 1);
    } else {
      std::rotate(moved.begin() + target, moved.begin() + source, moved.begin() + source + 1);
    }
    if (moved != row) changed.emplace_back(rank, std::move(moved));
  }

  // Swap every adjacent pair of two given op codes within a window, which changes the steady state.
  void repeated_swap(const Order& rows, int kinds, Random& random, Changes& changed) const {
    const auto [first, last] = some_ranks(random);
    const int chunks = chunks_[first];
    const int before = 3 * random.below(chunks) + random.below(kinds);
    const int after = 3 * random.below(chunks) + random.below(kinds);
    const int length = static_cast<int>(rows[first].size());
    const auto [low, high] = some_of(length, random);
    if (before == after) return;
    for (int rank = first; rank <= last; ++rank) {
      Row row = rows[rank];
      const int end = std::min(high, static_cast<int>(row.size()));
      for (int step = low; step + 1 < end; ++step) {
        if (row[step] == before && row[step + 1] == after) {
          std::swap(row[step], row[step + 1]);
          ++step;
        }
      }
      if (row != rows[rank]) changed.emplace_back(rank, std::move(row));
    }
  }

  // Move the F or B of one chunk by the same number of steps for many microbatches and, with a drift, over many ranks.
  void repeated_shift(const Order& rows, Random& random, Changes& changed) const {
    const auto [first, last] = some_ranks(random);
    const int chunks = chunks_[first];
    const int code = 3 * random.below(chunks) + random.below(2);
    const double scale = random.unit();
    const int distance = 1 + static_cast<int>(scale * scale * (3 * chunks));
    const bool later = random.below(2) == 1;
    const auto [low, high] = some_of(m_, random);
    const int slope = random.below(3) - 1;
    for (int rank = first; rank <= last; ++rank) {
      const int drift = slope * (rank - first);
      Row row = rows[rank];
      const int length = static_cast<int>(row.size());
      if (later) {
        int count = m_;
        for (int step = length - 1; step >= 0; --step) {
          if (row[step] != code) continue;
          --count;
          if (count < low + drift || count > high + drift || step + distance >= length) continue;
          std::rotate(row.begin() + step, row.begin() + step + 1, row.begin() + step + distance + 1);
        }
      } else {
        int count = -1;
        for (int step = 0; step < length; ++step) {
          if (row[step] != code) continue;
          ++count;
          if (count < low + drift || count > high + drift || step < distance) continue;
          std::rotate(row.begin() + step - distance, row.begin() + step, row.begin() + step + 1);
        }
      }
      if (row != rows[rank]) changed.emplace_back(rank, std::move(row));
    }
  }

  // Assign two microbatches to each other's slots, or move one to another slot; there are at least two.
  void reassign(std::vector<int>& slots, Random& random) const {
    const int m = static_cast<int>(slots.size()), from = random.below(m), to = (from + 1 + random.below(m - 1)) % m;
    if (random.unit() >= kRotateShare) {
      std::swap(slots[from], slots[to]);
    } else if (from < to) {
      std::rotate(slots.begin() + from, slots.begin() + from + 1, slots.begin() + to + 1);
    } else {
      std::rotate(slots.begin() + to, slots.begin() + from, slots.begin() + from + 1);
    }
  }

 private:
  // A random range of ranks, as (first, last): all, several adjacent ones, or one.
  std::pair<int, int> some_ranks(Random& random) const {
    const int first = random.below(p_);
    const double choice = random.unit();
    if (choice < 0.3) return {0, p_ - 1};
    if (choice < 0.7) return {first, std::min(p_ - 1, first + 1 + random.below(p_))};
    return {first, first};
  }

  // A random window of `length` steps or microbatches; each end is open with probability one half.
  std::pair<int, int> some_of(int length, Random& random) const {
    const int low = random.below(length), high = random.below(length), open = random.below(4);
    return {open & 1 ? 0 : std::min(low, high), open & 2 ? length : std::max(low, high)};
  }

  int m_, p_;
  std::vector<int> chunks_;
};

}  // namespace zerobubble
