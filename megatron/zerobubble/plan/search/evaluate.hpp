// The evaluator: the times and memory of an order under the costs, and the Ws that fill its bubbles. core.py documents it.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "moves.hpp"
#include "problem.hpp"

namespace zerobubble {

// Share of the ranks' mean span in the score, for each objective; the maximum alone is flat under most moves.
constexpr double kSpanMeanWeight = 0.3, kMakespanMeanWeight = 0.1;

// Steps of a row between two snapshots of its rank.
constexpr int kSnapshotSteps = 16;

// A score is certain to be worse only where it is so by more than rounding errors.
constexpr double kCertain = 1.0 + 1e-9;

class Evaluator : public Problem {
 public:
  template <typename... Arguments>
  explicit Evaluator(Arguments&&... arguments) : Problem(std::forward<Arguments>(arguments)...) {
    take(own_);
    for (int list = 0; list < 3 * num_stages_; ++list) lists_.push_back(list_of(list / 3, list % 3));
    for (const auto& own : stages_) {
      Rank rank{work_of(own)};
      for (const int stage : own) {
        rank.lists.insert(rank.lists.end(), {3 * stage, 3 * stage + 1, 3 * stage + 2});
        for (int kind = 0; kind < 2 && !busy_.empty(); ++kind) {
          List& list = lists_[3 * stage + kind];
          if (list.consumer < 0) continue;
          const auto found = std::find(rank.receivers.begin(), rank.receivers.end(), list.consumer_rank);
          list.queue = static_cast<int>(found - rank.receivers.begin());
          if (found == rank.receivers.end()) rank.receivers.push_back(list.consumer_rank);
        }
      }
      rank.free.resize(rank.receivers.size());
      ranks_.push_back(std::move(rank));
    }
    awaited_.resize(p_);
    done_.resize(lists_.size());
    begun_.resize(lists_.size());
    for (auto* each : {&ends_, &kept_ends_}) each->resize(static_cast<std::size_t>(2) * num_stages_ * m_);
    steps_.resize(ends_.size());
  }

  std::pair<double, double> evaluate(const Order& order) {
    return run<false>(order, std::vector<double>(p_, kInfinity), nullptr);
  }

  Order fill(const Order& rows, const std::vector<double>& patience) {
    Order order(p_);
    if (run<false>(rows, patience, &order).second == kInfinity) return {};
    return order;
  }

  // The same with microbatch i of an order the one that is `assignment[i]` in the costs.
  std::pair<double, double> evaluate_assigned(const Order& rows, const std::vector<double>& patience,
                                              const std::vector<int>& assignment) {
    take(assignment);
    const auto found = run<false>(rows, patience, nullptr);
    take(own_);
    return found;
  }

  Order fill_assigned(const Order& rows, const std::vector<double>& patience, const std::vector<int>& assignment) {
    take(assignment);
    const Order order = fill(rows, patience);
    take(own_);
    return order;
  }

 protected:
  // Index into a list of costs with a column for the microbatch or slice that F number `count` is of.
  int at(int list, int count) const { return list * width_ + slots_[count]; }

  // Find the column of costs of every F, and the F that every B and W belongs to. Equal microbatches have one column.
  void take(const std::vector<int>& assignment) {
    if (counts_.empty()) {
      if (is_unequal_) {
        slots_ = assignment;
      } else if (slots_.empty()) {
        for (int number = 0; number < m_; ++number) slots_.push_back(number % width_);
      }
      return;
    }
    slots_.clear();
    forward_of_.clear();
    for (const int microbatch : assignment) {
      const int first = static_cast<int>(slots_.size());
      for (int slice = 0; slice < counts_[microbatch]; ++slice) {
        slots_.push_back(starts_[microbatch] + slice);
        forward_of_.push_back(first + counts_[microbatch] - 1 - slice);
      }
    }
  }

  // The first F from which on another assignment differs.
  int first_changed(const std::vector<int>& before, const std::vector<int>& after) const {
    const auto same = std::mismatch(before.begin(), before.end(), after.begin()).first;
    if (counts_.empty()) return static_cast<int>(same - before.begin());
    return std::accumulate(before.begin(), same, 0, [&](int sum, int microbatch) { return sum + counts_[microbatch]; });
  }

  // Score and objective of rows that may leave W out; the rows with every W are appended to `out`.
  //
  // With `keeps`, the times are kept as those of the order that annealing goes on from. Only the ops that may have changed since
  // are run: an op that started before `since` in the kept order has neither changed nor waited for one that has. And a run ends,
  // with infinite numbers, where its score is certain to be above `most`. Neither changes a number.
  template <bool keeps>
  std::pair<double, double> run(const Order& rows, const std::vector<double>& patience, Order* out,
                                double since = -kInfinity, double most = kInfinity) {
    stack_.clear();
    double total = 0, done = 0, excess = 0, idle = 0, busy = 0, longest = 0;
    for (int rank = p_ - 1; rank >= 0; --rank) {
      stack_.push_back(rank);
      awaited_[rank] = -1;
      Rank& self = ranks_[rank];
      begin(self, rows[rank].size(), since);
      total += static_cast<double>(rows[rank].size());
      done += self.step;
      excess += self.excess;
      idle += self.idle;
      busy += self.busy;
      longest = std::max(longest, self.busy + self.idle);
    }
    work += total;
    while (!stack_.empty()) {
      const int rank = stack_.back();
      stack_.pop_back();
      Rank& self = ranks_[rank];
      const Row& row = rows[rank];
      const int length = static_cast<int>(row.size()), begin = self.step;
      const int* own = self.lists.data();
      const int codes = static_cast<int>(self.lists.size());
      double now = self.now, held = self.held;
      Row* emitted = out ? &(*out)[rank] : nullptr;
      const auto wgrad = [&](int code) {
        const int list = own[code], count = done_[list]++;
        now += durations_[at(list, forward_of_[count])];
        held -= remaining_[at(lists_[list].stage, forward_of_[count])];
        if (emitted) emitted->push_back(static_cast<char>(code));
      };
      int step = begin;
      for (; step < length; ++step) {
        const int code = row[step], list = own[code], count = done_[list];
        const List& pass = lists_[list];
        if (keeps) {
          if (step % kSnapshotSteps == 0) keep(self, step, now, held);
          self.bound[step] = -1;
          self.starts[step] = now;
        }
        if (pass.kind == 2) {
          if (count < done_[list - 1]) wgrad(code);
          continue;
        }
        const int forward = pass.kind == 0 ? count : forward_of_[count];
        if (pass.kind == 1 && forward >= done_[list - 1]) return {kInfinity, kInfinity};
        double ready = now;
        if (pass.producer >= 0) {
          if (done_[pass.producer] <= count) {
            awaited_[rank] = list;
            break;
          }
          const auto& ends = count < begun_[pass.producer] ? kept_ends_ : ends_;
          ready = ends[pass.produced + count];
        }
        const double needed = activation_[at(pass.stage, forward)];
        while (true) {
          const bool full = pass.kind == 0 && held + needed > limit_ + kEpsilon;
          if (!full && ready <= now) break;
          int oldest = -1, microbatch = m_;
          for (int c = codes - 1; c >= 0; c -= 3) {
            if (done_[own[c]] < done_[own[c - 1]] && done_[own[c]] < microbatch) {
              oldest = c;
              microbatch = done_[own[c]];
            }
          }
          if (full && oldest < 0) {
            if (excess_ms_ <= 0) return {kInfinity, kInfinity};
            self.excess += held + needed - limit_;
            excess += held + needed - limit_;
            break;
          }
          if (oldest < 0 || (!full && ready - now < patience[rank] * durations_[at(own[oldest], forward_of_[microbatch])])) break;
          wgrad(oldest);
        }
        if (ready > now) {
          if (step > 0) {
            self.idle += ready - now;
            idle += ready - now;
          }
          now = ready;
          if (keeps) self.bound[step] = pass.produced + count;
          longest = std::max(longest, (makespan_ && step > 0 ? self.first : 0.0) + self.busy + self.idle);
          if (longest + mean_weight_ * ((busy + idle) / p_) + excess_ms_ * excess > most) return {kInfinity, kInfinity};
        }
        if (step == 0) self.first = now;
        if (keeps) self.starts[step] = now;
        now += durations_[at(list, forward)];
        held += pass.kind == 0 ? needed : remaining_[at(pass.stage, forward)] - needed;
        done_[list] = count + 1;
        if (emitted) emitted->push_back(static_cast<char>(code));
        const double there = sent(self, pass, now, forward);
        ends_[pass.first + count] = there;
        if (keeps) {
          kept_ends_[pass.first + count] = there;
          steps_[pass.first + count] = step;
        }
        if (pass.consumer_rank >= 0 && awaited_[pass.consumer_rank] == pass.consumer && done_[pass.consumer] == count) {
          awaited_[pass.consumer_rank] = -1;
          stack_.push_back(pass.consumer_rank);
        }
      }
      if (step == length && begin < length) {
        for (int code = codes - 1; code >= 0; code -= 3) {
          while (done_[own[code]] < done_[own[code - 1]]) wgrad(code);
        }
      }
      self.step = step;
      self.now = now;
      self.held = held;
      done += step - begin;
    }
    if (done < total) return {kInfinity, kInfinity};
    double first = kInfinity, last = 0.0, mean = 0.0;
    longest = excess = 0.0;
    for (const Rank& self : ranks_) {
      longest = std::max(longest, self.now - self.first);
      mean += self.now - self.first;
      first = std::min(first, self.first);
      last = std::max(last, self.now);
      excess += self.excess;
    }
    const double objective = makespan_ ? last - first : longest;
    const double score = objective + mean_weight_ * (mean / p_);
    if (excess > 0) return {score + excess_ms_ * excess, kInfinity};
    return {score, objective};
  }

  // A time of the kept order before which `rank` has run nothing from `step` on.
  double time_before(int rank, int step) const { return ranks_[rank].snapshots[step / kSnapshotSteps].now; }

  // The same for an F of stage 0.
  double time_before_forward(int number) const { return time_before(rank_of_[0], steps_[number]); }

  // The ops of the kept order, just run, that determine its time.
  void find_critical(const Order& rows) {
    critical_.clear();
    const auto length = [&](int rank) { return ranks_[rank].now - (makespan_ ? 0.0 : ranks_[rank].first); };
    int rank = 0;
    for (int other = 1; other < p_; ++other) {
      if (length(other) > length(rank)) rank = other;
    }
    int step = static_cast<int>(rows[rank].size()) - 1;
    while (step >= 0) {
      critical_.emplace_back(rank, step);
      const long key = ranks_[rank].bound[step];
      if (key >= 0) {
        rank = rank_of_[(key / m_) % num_stages_];
        step = steps_[key];
      } else {
        --step;
      }
    }
  }

  std::vector<int> slots_;
  Critical critical_;

 private:
  // The ops of one stage and kind.
  struct List {
    int stage, kind;
    long first;  // where the ends of its F or B begin
    int producer = -1, consumer = -1, consumer_rank = -1;  // lists, of which one op each is input and output
    long produced = -1;
    int queue = -1;  // where in `Rank::free` the link to the consumer is
  };

  // The state of a rank before a step.
  struct State {
    double now = 0.0, held = 0.0, idle = 0.0, excess = 0.0;
  };

  struct Rank : State {
    explicit Rank(double busy_ms) : busy(busy_ms) {}

    double busy, first = 0.0;
    int step = 0;
    std::vector<int> lists;  // of the codes in a row
    std::vector<int> receivers;  // ranks that it sends to, where messages occupy their links
    std::vector<double> free;  // per receiver, when the link to it takes the next message

    // Of the kept order.
    std::vector<double> starts;
    std::vector<long> bound;  // per step, the end that it waited for; -1 if none
    std::vector<State> snapshots;
    std::vector<int> done;  // per snapshot and code
    std::vector<double> kept_free;  // per snapshot and receiver
  };

  List list_of(int stage, int kind) const {
    List list{stage, kind, (static_cast<long>(kind) * num_stages_ + stage) * m_};
    if (kind == 2) return list;
    const int before = kind == 0 ? stage - 1 : stage + 1, after = kind == 0 ? stage + 1 : stage - 1;
    if (before >= 0 && before < num_stages_) {
      list.producer = 3 * before + kind;
      list.produced = (static_cast<long>(kind) * num_stages_ + before) * m_;
    }
    if (after >= 0 && after < num_stages_) {
      list.consumer = 3 * after + kind;
      list.consumer_rank = rank_of_[after];
    }
    return list;
  }

  // To the start, or to the last snapshot before what started at `since` or later.
  void begin(Rank& rank, std::size_t length, double since) {
    const std::size_t codes = rank.lists.size();
    if (rank.starts.size() != length) {
      rank.starts.resize(length);
      rank.bound.resize(length);
      rank.snapshots.resize(length / kSnapshotSteps + 1);
      rank.done.resize(rank.snapshots.size() * codes);
      rank.kept_free.resize(rank.snapshots.size() * rank.free.size());
    }
    std::size_t snapshot = 0;
    if (since > -kInfinity && length > 0) {
      const auto same = std::lower_bound(rank.starts.begin(), rank.starts.end(), since) - rank.starts.begin();
      snapshot = std::min<std::size_t>(same, length - 1) / kSnapshotSteps;
    }
    rank.step = static_cast<int>(snapshot) * kSnapshotSteps;
    static_cast<State&>(rank) = snapshot > 0 ? rank.snapshots[snapshot] : State{};
    rank.first = snapshot > 0 ? rank.starts[0] : 0.0;
    for (std::size_t to = 0; to < rank.free.size(); ++to) {
      rank.free[to] = snapshot > 0 ? rank.kept_free[snapshot * rank.free.size() + to] : 0.0;
    }
    for (std::size_t code = 0; code < codes; ++code) {
      const int list = rank.lists[code];
      begun_[list] = done_[list] = snapshot > 0 ? rank.done[snapshot * codes + code] : 0;
    }
  }

  void keep(Rank& rank, int step, double now, double held) {
    const std::size_t snapshot = step / kSnapshotSteps, codes = rank.lists.size();
    rank.snapshots[snapshot] = {now, held, rank.idle, rank.excess};
    for (std::size_t code = 0; code < codes; ++code) rank.done[snapshot * codes + code] = done_[rank.lists[code]];
    std::copy(rank.free.begin(), rank.free.end(), rank.kept_free.begin() + snapshot * rank.free.size());
  }

  // When a result that is there `now` has reached the stage that needs it.
  double sent(Rank& rank, const List& pass, double now, int forward) {
    const int link = at(pass.kind * num_stages_ + pass.stage, forward);
    if (pass.queue < 0) return now + links_[link];
    double& free = rank.free[pass.queue];
    const double start = std::max(now, free);
    free = start + busy_[link];
    return start + links_[link];
  }

  // The time of all ops of a rank.
  double work_of(const std::vector<int>& own) const {
    double sum = 0.0;
    for (const int stage : own) {
      for (int kind = 0; kind < 3; ++kind) {
        for (int slot = 0; slot < m_; ++slot) sum += durations_[at(3 * stage + kind, slot)];
      }
    }
    return sum;
  }

  double mean_weight_ = makespan_ ? kMakespanMeanWeight : kSpanMeanWeight;
  std::vector<List> lists_;
  std::vector<Rank> ranks_;
  std::vector<int> awaited_;  // per rank, the list of the op whose input is not there yet; -1 if none
  std::vector<int> done_, begun_;  // per list, the ops run, and those of the kept order before the run began
  std::vector<double> ends_, kept_ends_;  // of every F and B; of the kept order
  std::vector<int> steps_;
  std::vector<int> stack_;
};

}  // namespace zerobubble
