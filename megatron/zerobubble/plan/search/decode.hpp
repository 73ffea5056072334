// The list scheduler: from a policy to an order. core.py documents it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "evaluate.hpp"

namespace zerobubble {

// Op evaluations charged for list-scheduling one op.
constexpr double kDecodeWeight = 8;

struct Policy {
  std::vector<double> durations;
  double comm_ms;
  std::vector<double> offsets;
  std::vector<double> caps;
  double period;
  double wait_weight;
  double max_wait;
  double limit;
  double settled;
  double settle_after;
};

class ListScheduler : public Evaluator {
 public:
  using Evaluator::Evaluator;

  Order decode(const Policy& policy) {
    const int S = num_stages_, m = m_;
    Order rows(p_);
    std::vector<double> ends(static_cast<std::size_t>(2) * S * m, -1.0);
    std::vector<int> counts(3 * S, 0);
    std::vector<double> free(p_, 0.0), held(p_, 0.0);
    count_begun();
    using Event = std::pair<double, int>;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    for (int rank = 0; rank < p_; ++rank) events.push({0.0, rank});
    long done = 0;
    while (!events.empty()) {
      const auto [now, rank] = events.top();
      events.pop();
      if (now < free[rank] - kEpsilon) continue;
      const Choice choice = choose(policy, rank, now, counts, ends, held[rank]);
      const int stage = choice.stage, kind = choice.kind;
      if (stage < 0) continue;
      if (choice.start > now + kEpsilon) {
        events.push({choice.start, rank});
        continue;
      }
      const int number = counts[3 * stage + kind]++;
      const double end = now + policy.durations[3 * stage + kind];
      free[rank] = end;
      rows[rank].push_back(static_cast<char>(3 * chunk_of_[stage] + kind));
      ++done;
      const int column = at(stage, kind == 0 ? number : forward_of_[number]);
      if (kind == 2) {
        held[rank] -= remaining_[column];
      } else {
        held[rank] += kind == 0 ? activation_[column] : remaining_[column] - activation_[column];
        ends[(static_cast<long>(kind) * S + stage) * m + number] = end;
        const int consumer = kind == 0 ? stage + 1 : stage - 1;
        if (consumer >= 0 && consumer < S && rank_of_[consumer] != rank) {
          const int other = rank_of_[consumer];
          events.push({std::max(end + policy.comm_ms, free[other]), other});
        }
      }
      events.push({end, rank});
    }
    work += kDecodeWeight * static_cast<double>(done);
    if (done != 3L * S * m) return {};
    return rows;
  }

 private:
  struct Choice {
    int stage;
    int kind;
    double start;
  };

  Choice choose(const Policy& policy, int rank, double now, const std::vector<int>& counts,
                const std::vector<double>& ends, double held) const {
    const int S = num_stages_, m = m_;
    double best = kInfinity;
    Choice chosen{-1, 0, 0.0};
    const auto& own = stages_[rank];
    for (int chunk = 0; chunk < static_cast<int>(own.size()); ++chunk) {
      const int stage = own[chunk];
      for (int kind = 0; kind < 3; ++kind) {
        const int number = counts[3 * stage + kind];
        if (number >= (kind == 0 ? m : counts[3 * stage + kind - 1])) continue;
        if (kind == 1 && forward_of_[number] >= counts[3 * stage]) continue;
        double arrival = 0.0;
        const int producer = kind == 0 ? stage - 1 : stage + 1;
        if (kind < 2 && producer >= 0 && producer < S) {
          arrival = ends[(static_cast<long>(kind) * S + producer) * m + number];
          if (arrival < 0) continue;
          if (rank_of_[producer] != rank) arrival += policy.comm_ms;
          if (arrival > now + policy.max_wait) continue;
        }
        const double wait = std::max(arrival - now, 0.0);
        const double value = policy.offsets[3 * stage + kind] + number * policy.period + policy.wait_weight * wait;
        if (value < best && (kind > 0 || admits(policy, rank, chunk, counts, held))) {
          best = value;
          chosen = {stage, kind, now + wait};
        }
      }
    }
    return chosen;
  }

  bool admits(const Policy& policy, int rank, int chunk, const std::vector<int>& counts, double held) const {
    const auto& own = stages_[rank];
    const int stage = own[chunk], last = static_cast<int>(own.size()) - 1;
    const double limit = std::min(limit_, policy.limit);
    const int started = counts[3 * stage];
    const double needed = begun(stage, n_) - begun(stage, started % n_);
    if (held + needed > limit + kEpsilon) return false;
    const int passed = chunk < last ? counts[3 * own[chunk + 1]] : counts[3 * stage + 1] + n_ - 1;
    const double share = 1.0 - (1.0 - policy.settled) * std::min(1.0, started / policy.settle_after);
    if (started - passed >= policy.caps[stage] * share) return false;
    for (int c = chunk; c < last; ++c) {
      double waiting = 0.0;
      const int beyond = counts[3 * own[c + 1]] / n_ * n_;
      for (int k = 0; k <= c; ++k) {
        const int ahead = counts[3 * own[k]] + (k == chunk ? 1 : 0) - beyond;
        if (ahead > 0) waiting += begun(own[k], std::max(ahead, n_));
      }
      for (int k = c + 1; k <= last; ++k) waiting += begun(own[k], n_);
      if (waiting > limit + kEpsilon) return false;
    }
    return true;
  }

  // Activation memory of the first `count` slices that a stage runs, with all that their microbatches reserve.
  double begun(int stage, int count) const {
    const double* sums = &begun_sums_[static_cast<std::size_t>(stage) * (n_ + 1)];
    return count / n_ * sums[n_] + sums[count % n_];
  }

  void count_begun() {
    begun_sums_.clear();
    for (int stage = 0; stage < num_stages_; ++stage) {
      begun_sums_.push_back(0.0);
      for (int slice = 0; slice < n_; ++slice) begun_sums_.push_back(begun_sums_.back() + activation_[at(stage, slice)]);
    }
  }

  std::vector<double> begun_sums_;
};

}  // namespace zerobubble
