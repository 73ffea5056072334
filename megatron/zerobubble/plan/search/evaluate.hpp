// The evaluator: the times and memory of an order under the costs, and the Ws that fill its bubbles. Twin of core.py, which
// documents it: the same arithmetic in the same order.

#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "moves.hpp"
#include "problem.hpp"

namespace zerobubble {

constexpr double kMeanWeight = 0.1;

class Evaluator : public Problem {
 public:
  template <typename... Arguments>
  explicit Evaluator(Arguments&&... arguments) : Problem(std::forward<Arguments>(arguments)...) {
    slots_.assign(m_, 0);
    if (width_ > 1) reset_slots();
    awaited_.resize(p_);
    bound_.resize(p_);
    step_of_.resize(static_cast<std::size_t>(2) * num_stages_ * m_);
    position_.resize(p_);
    free_.resize(p_);
    first_.resize(p_);
    held_.resize(p_);
    counts_.resize(p_);
  }

  std::pair<double, double> evaluate(const Order& order) {
    return run(order, std::vector<double>(p_, kInfinity), nullptr);
  }

  Order fill(const Order& rows, const std::vector<double>& patience) {
    Order order(p_);
    if (run(rows, patience, &order).second == kInfinity) return {};
    return order;
  }

  // The same with microbatch i of an order the one that is `assignment[i]` in the costs.
  std::pair<double, double> evaluate_assigned(const Order& rows, const std::vector<double>& patience,
                                              const std::vector<int>& assignment) {
    take_slots(assignment);
    const auto found = run(rows, patience, nullptr);
    reset_slots();
    return found;
  }

  Order fill_assigned(const Order& rows, const std::vector<double>& patience, const std::vector<int>& assignment) {
    take_slots(assignment);
    const Order order = fill(rows, patience);
    reset_slots();
    return order;
  }

 protected:
  // Index into costs per microbatch of the plan's microbatch `count`; 0 where all microbatches are equal.
  int at(int list, int count) const { return list * width_ + slots_[count]; }

  // Equal microbatches have one column of costs, whatever the assignment.
  void take_slots(const std::vector<int>& assignment) {
    if (width_ > 1) slots_ = assignment;
  }

  void reset_slots() {
    for (int slot = 0; slot < m_; ++slot) slots_[slot] = width_ > 1 ? slot : 0;
  }

  std::pair<double, double> run(const Order& rows, const std::vector<double>& patience, Order* out) {
    const int S = num_stages_, m = m_;
    ends_.assign(static_cast<std::size_t>(2) * S * m, -1.0);
    stack_.clear();
    double total = 0, done = 0, excess = 0;
    for (int rank = p_ - 1; rank >= 0; --rank) {
      stack_.push_back(rank);
      awaited_[rank] = -1;
      position_[rank] = 0;
      free_[rank] = first_[rank] = held_[rank] = 0.0;
      counts_[rank].assign(3 * stages_[rank].size(), 0);
      total += static_cast<double>(rows[rank].size());
    }
    work += total;
    while (!stack_.empty()) {
      const int rank = stack_.back();
      stack_.pop_back();
      const Row& row = rows[rank];
      const int length = static_cast<int>(row.size()), begin = position_[rank];
      const int* own = stages_[rank].data();
      const int chunks = static_cast<int>(stages_[rank].size());
      int* counts = counts_[rank].data();
      double now = free_[rank], held = held_[rank];
      Row* emitted = out ? &(*out)[rank] : nullptr;
      const auto wgrad = [&](int chunk) {
        const int count = counts[3 * chunk + 2]++;
        now += durations_[at(3 * own[chunk] + 2, count)];
        held -= remaining_[at(own[chunk], count)];
        if (emitted) emitted->push_back(static_cast<char>(3 * chunk + 2));
      };
      int step = begin;
      if (bound_[rank].size() != row.size()) bound_[rank].resize(row.size());
      long* bound = bound_[rank].data();
      for (; step < length; ++step) {
        bound[step] = -1;
        const int code = row[step], chunk = code / 3, kind = code - 3 * chunk, stage = own[chunk], count = counts[code];
        if (kind == 2) {
          if (count < counts[code - 1]) wgrad(chunk);
          continue;
        }
        if (kind == 1 && count >= counts[code - 1]) return {kInfinity, kInfinity};
        const int producer = kind == 0 ? stage - 1 : stage + 1;
        double ready = now;
        long awaited = -1;
        if (producer >= 0 && producer < S) {
          awaited = (static_cast<long>(kind) * S + producer) * m + count;
          ready = ends_[awaited];
          if (ready < 0) {
            awaited_[rank] = awaited;
            break;
          }
          ready += links_[at(kind * S + producer, count)];
        }
        const double needed = activation_[at(stage, count)];
        while (true) {
          const bool full = kind == 0 && held + needed > limit_ + kEpsilon;
          if (!full && ready <= now) break;
          int oldest = -1, microbatch = m;
          for (int c = chunks - 1; c >= 0; --c) {
            if (counts[3 * c + 2] < counts[3 * c + 1] && counts[3 * c + 2] < microbatch) {
              oldest = c;
              microbatch = counts[3 * c + 2];
            }
          }
          if (full && oldest < 0) {
            if (excess_ms_ <= 0) return {kInfinity, kInfinity};
            excess += held + needed - limit_;
            break;
          }
          if (oldest < 0 || (!full && ready - now < patience[rank] * durations_[at(3 * own[oldest] + 2, microbatch)])) break;
          wgrad(oldest);
        }
        if (ready > now) {
          now = ready;
          bound[step] = awaited;
        }
        if (step == 0) first_[rank] = now;
        now += durations_[at(3 * stage + kind, count)];
        held += kind == 0 ? needed : remaining_[at(stage, count)] - needed;
        counts[code] = count + 1;
        if (emitted) emitted->push_back(static_cast<char>(code));
        const long key = (static_cast<long>(kind) * S + stage) * m + count;
        ends_[key] = now;
        step_of_[key] = step;
        const int consumer = kind == 0 ? stage + 1 : stage - 1;
        if (consumer >= 0 && consumer < S && awaited_[rank_of_[consumer]] == key) {
          awaited_[rank_of_[consumer]] = -1;
          stack_.push_back(rank_of_[consumer]);
        }
      }
      if (step == length && begin < length) {
        for (int chunk = chunks - 1; chunk >= 0; --chunk) {
          while (counts[3 * chunk + 2] < counts[3 * chunk + 1]) wgrad(chunk);
        }
      }
      position_[rank] = step;
      free_[rank] = now;
      held_[rank] = held;
      done += step - begin;
    }
    if (done < total) return {kInfinity, kInfinity};
    double longest = 0.0, mean = 0.0;
    for (int rank = 0; rank < p_; ++rank) {
      const double span = free_[rank] - first_[rank];
      longest = std::max(longest, span);
      mean += span;
    }
    const double objective = makespan_ ? *std::max_element(free_.begin(), free_.end()) -
                                             *std::min_element(first_.begin(), first_.end())
                                       : longest;
    const double score = objective + kMeanWeight * (mean / p_);
    if (excess > 0) return {score + excess_ms_ * excess, kInfinity};
    return {score, objective};
  }

  void find_critical(const Order& rows) {
    critical_.clear();
    const auto length = [&](int rank) { return free_[rank] - (makespan_ ? 0.0 : first_[rank]); };
    int rank = 0;
    for (int other = 1; other < p_; ++other) {
      if (length(other) > length(rank)) rank = other;
    }
    int step = static_cast<int>(rows[rank].size()) - 1;
    while (step >= 0) {
      critical_.emplace_back(rank, step);
      const long key = bound_[rank][step];
      if (key >= 0) {
        rank = rank_of_[(key / m_) % num_stages_];
        step = step_of_[key];
      } else {
        --step;
      }
    }
  }

  std::vector<int> slots_;
  std::vector<double> ends_, free_, first_, held_;
  Critical critical_;

 private:
  std::vector<long> awaited_;
  std::vector<std::vector<long>> bound_;
  std::vector<int> step_of_;
  std::vector<int> position_, stack_;
  std::vector<std::vector<int>> counts_;
};

}  // namespace zerobubble
