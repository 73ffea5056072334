// The inner loop of the search, compiled. Twin of core.py, which documents it: the same arithmetic in the same order and
// the same random numbers, so that the same seed gives the same plan. Build without floating-point contraction (a*b+c).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "moves.hpp"

namespace py = pybind11;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = 1e-9;
constexpr double kDecodeWeight = 8;
constexpr double kMoveWeight = 40;
constexpr double kMeanWeight = 0.1;
constexpr double kPatienceShare = 0.05;
constexpr double kSwapShare = 0.1;
constexpr double kShiftShare = 0.9;
constexpr double kPlainShiftShare = 0.2;

using zerobubble::Changes;
using zerobubble::Critical;
using zerobubble::Moves;
using zerobubble::Order;
using zerobubble::Random;
using zerobubble::Row;

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

using PolicyTuple = std::tuple<std::vector<double>, double, std::vector<double>, std::vector<double>, double, double, double,
                               double, double, double>;

Policy from_tuple(const PolicyTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t),
          std::get<5>(t), std::get<6>(t), std::get<7>(t), std::get<8>(t), std::get<9>(t)};
}

class NativeCore {
 public:
  NativeCore(int num_microbatches, std::vector<int> stage_to_rank, std::vector<double> durations, double comm_ms,
             std::vector<double> activation, std::vector<double> remaining, double limit, bool makespan)
      : m_(num_microbatches),
        rank_of_(std::move(stage_to_rank)),
        durations_(std::move(durations)),
        comm_ms_(comm_ms),
        activation_(std::move(activation)),
        remaining_(std::move(remaining)),
        limit_(limit),
        makespan_(makespan) {
    num_stages_ = static_cast<int>(rank_of_.size());
    p_ = *std::max_element(rank_of_.begin(), rank_of_.end()) + 1;
    stages_.resize(p_);
    for (int stage = 0; stage < num_stages_; ++stage) {
      auto& own = stages_[rank_of_[stage]];
      chunk_of_.push_back(static_cast<int>(own.size()));
      own.push_back(stage);
    }
    awaited_.resize(p_);
    bound_.resize(p_);
    step_of_.resize(static_cast<std::size_t>(2) * num_stages_ * m_);
    position_.resize(p_);
    free_.resize(p_);
    first_.resize(p_);
    held_.resize(p_);
    counts_.resize(p_);
  }

  double work = 0.0;

  std::pair<double, double> evaluate(const Order& order) {
    return run(order, std::vector<double>(p_, kInfinity), nullptr);
  }

  Order fill(const Order& rows, const std::vector<double>& patience) {
    Order order(p_);
    if (run(rows, patience, &order).first == kInfinity) return {};
    return order;
  }

  Order decode(const Policy& policy) {
    const int S = num_stages_, m = m_;
    Order rows(p_);
    ends_.assign(static_cast<std::size_t>(2) * S * m, -1.0);
    std::vector<int> counts(3 * S, 0);
    std::vector<double> free(p_, 0.0), held(p_, 0.0);
    using Event = std::pair<double, int>;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    for (int rank = 0; rank < p_; ++rank) events.push({0.0, rank});
    long done = 0;
    while (!events.empty()) {
      const auto [now, rank] = events.top();
      events.pop();
      if (now < free[rank] - kEpsilon) continue;
      const Choice choice = choose(policy, rank, now, counts, held[rank]);
      const int stage = choice.stage, kind = choice.kind;
      if (stage < 0) continue;
      if (choice.start > now + kEpsilon) {
        events.push({choice.start, rank});
        continue;
      }
      const int microbatch = counts[3 * stage + kind]++;
      const double end = now + policy.durations[3 * stage + kind];
      free[rank] = end;
      rows[rank].push_back(static_cast<char>(3 * chunk_of_[stage] + kind));
      ++done;
      if (kind == 2) {
        held[rank] -= remaining_[stage];
      } else {
        held[rank] += kind == 0 ? activation_[stage] : remaining_[stage] - activation_[stage];
        ends_[(static_cast<long>(kind) * S + stage) * m + microbatch] = end;
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

  Order anneal(const Order& order, const std::vector<double>& patience_of, std::uint64_t seed, double budget,
               double temperature) {
    Random random(seed);
    std::vector<int> chunks;
    for (const auto& own : stages_) chunks.push_back(static_cast<int>(own.size()));
    const Moves moves(m_, std::move(chunks));
    Order rows = order, best = order;
    std::vector<double> patience = patience_of, best_patience = patience_of, saved;
    const bool filled = std::any_of(patience.begin(), patience.end(), [](double value) { return value < kInfinity; });
    const int kinds = filled ? 2 : 3;
    double score = run(rows, patience, nullptr).first, best_score = score;
    if (score == kInfinity) return {};
    find_critical(rows);
    const double begin = work;
    Changes changed;
    while (work - begin < budget) {
      const double left = 1.0 - (work - begin) / budget;
      changed.clear();
      saved.clear();
      const double choice = random.unit();
      if (filled && choice < kPatienceShare) {
        saved = patience;
        moves.vary_patience(patience, random);
      } else if (choice < kSwapShare) {
        moves.repeated_swap(rows, kinds, random, changed);
      } else if (choice < (filled ? kShiftShare : kPlainShiftShare)) {
        moves.repeated_shift(rows, random, changed);
      } else {
        moves.single_move(rows, critical_, random, changed);
      }
      work += kMoveWeight;
      if (changed.empty() && saved.empty()) continue;
      for (auto& [rank, row] : changed) {
        rows[rank].swap(row);
        work += static_cast<double>(rows[rank].size());
      }
      const double candidate = run(rows, patience, nullptr).first;
      if (candidate <= score + temperature * left * left * random.unit()) {
        score = candidate;
        find_critical(rows);
        if (score < best_score) {
          best = rows;
          best_patience = patience;
          best_score = score;
        }
      } else {
        for (auto& [rank, row] : changed) rows[rank].swap(row);
        if (!saved.empty()) patience.swap(saved);
      }
    }
    return fill(best, best_patience);
  }

 private:
  struct Choice {
    int stage;
    int kind;
    double start;
  };

  Choice choose(const Policy& policy, int rank, double now, const std::vector<int>& counts, double held) const {
    const int S = num_stages_, m = m_;
    double best = kInfinity;
    Choice chosen{-1, 0, 0.0};
    const auto& own = stages_[rank];
    for (int chunk = 0; chunk < static_cast<int>(own.size()); ++chunk) {
      const int stage = own[chunk];
      for (int kind = 0; kind < 3; ++kind) {
        const int microbatch = counts[3 * stage + kind];
        if (microbatch >= (kind == 0 ? m : counts[3 * stage + kind - 1])) continue;
        double arrival = 0.0;
        const int producer = kind == 0 ? stage - 1 : stage + 1;
        if (kind < 2 && producer >= 0 && producer < S) {
          arrival = ends_[(static_cast<long>(kind) * S + producer) * m + microbatch];
          if (arrival < 0) continue;
          if (rank_of_[producer] != rank) arrival += policy.comm_ms;
          if (arrival > now + policy.max_wait) continue;
        }
        const double wait = std::max(arrival - now, 0.0);
        const double value = policy.offsets[3 * stage + kind] + microbatch * policy.period + policy.wait_weight * wait;
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
    if (held + activation_[stage] > limit + kEpsilon) return false;
    const int started = counts[3 * stage], passed = chunk < last ? counts[3 * own[chunk + 1]] : counts[3 * stage + 1];
    const double share = 1.0 - (1.0 - policy.settled) * std::min(1.0, started / policy.settle_after);
    if (started - passed >= policy.caps[stage] * share) return false;
    for (int c = chunk; c < last; ++c) {
      double waiting = activation_[stage];
      const int beyond = counts[3 * own[c + 1]];
      for (int k = 0; k <= c; ++k) waiting += (counts[3 * own[k]] - beyond) * activation_[own[k]];
      for (int k = c + 1; k <= last; ++k) waiting += activation_[own[k]];
      if (waiting > limit + kEpsilon) return false;
    }
    return true;
  }

  std::pair<double, double> run(const Order& rows, const std::vector<double>& patience, Order* out) {
    const int S = num_stages_, m = m_;
    ends_.assign(static_cast<std::size_t>(2) * S * m, -1.0);
    stack_.clear();
    double total = 0, done = 0;
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
        now += durations_[3 * own[chunk] + 2];
        held -= remaining_[own[chunk]];
        ++counts[3 * chunk + 2];
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
          if (rank_of_[producer] != rank) ready += comm_ms_;
        }
        while (true) {
          const bool full = kind == 0 && held + activation_[stage] > limit_ + kEpsilon;
          if (!full && ready <= now) break;
          int oldest = -1, microbatch = m;
          for (int c = chunks - 1; c >= 0; --c) {
            if (counts[3 * c + 2] < counts[3 * c + 1] && counts[3 * c + 2] < microbatch) {
              oldest = c;
              microbatch = counts[3 * c + 2];
            }
          }
          if (full && oldest < 0) return {kInfinity, kInfinity};
          if (oldest < 0 || (!full && ready - now < patience[rank] * durations_[3 * own[oldest] + 2])) break;
          wgrad(oldest);
        }
        if (ready > now) {
          now = ready;
          bound[step] = awaited;
        }
        if (step == 0) first_[rank] = now;
        now += durations_[3 * stage + kind];
        held += kind == 0 ? activation_[stage] : remaining_[stage] - activation_[stage];
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
    return {objective + kMeanWeight * (mean / p_), objective};
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

  int m_, p_, num_stages_;
  std::vector<int> rank_of_, chunk_of_;
  std::vector<std::vector<int>> stages_;
  std::vector<double> durations_;
  double comm_ms_;
  std::vector<double> activation_, remaining_;
  double limit_;
  bool makespan_;
  std::vector<double> ends_, free_, first_, held_;
  std::vector<long> awaited_;
  std::vector<std::vector<long>> bound_;
  std::vector<int> step_of_;
  Critical critical_;
  std::vector<int> position_, stack_;
  std::vector<std::vector<int>> counts_;
};

std::vector<py::bytes> to_bytes(const Order& order) {
  std::vector<py::bytes> rows;
  for (const Row& row : order) rows.emplace_back(row);
  return rows;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled twin of core.py";
  py::class_<NativeCore>(module, "NativeCore")
      .def(py::init<int, std::vector<int>, std::vector<double>, double, std::vector<double>, std::vector<double>, double, bool>())
      .def_readwrite("work", &NativeCore::work)
      .def("evaluate", &NativeCore::evaluate)
      .def("decode", [](NativeCore& core, const PolicyTuple& policy) { return to_bytes(core.decode(from_tuple(policy))); })
      .def("fill", [](NativeCore& core, const Order& rows,
                      const std::vector<double>& patience) { return to_bytes(core.fill(rows, patience)); })
      .def("anneal", [](NativeCore& core, const Order& rows, const std::vector<double>& patience, std::uint64_t seed, double budget,
                        double temperature) { return to_bytes(core.anneal(rows, patience, seed, budget, temperature)); });
}
