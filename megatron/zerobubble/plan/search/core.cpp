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
constexpr double kAssignShare = 0.8;
constexpr double kLateMoveShare = 0.5;

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
             std::vector<double> activation, std::vector<double> remaining, double limit, bool makespan,
             std::vector<double> links, double excess_ms)
      : m_(num_microbatches),
        rank_of_(std::move(stage_to_rank)),
        durations_(std::move(durations)),
        activation_(std::move(activation)),
        remaining_(std::move(remaining)),
        links_(std::move(links)),
        limit_(limit),
        makespan_(makespan),
        excess_ms_(excess_ms) {
    num_stages_ = static_cast<int>(rank_of_.size());
    p_ = *std::max_element(rank_of_.begin(), rank_of_.end()) + 1;
    stages_.resize(p_);
    for (int stage = 0; stage < num_stages_; ++stage) {
      auto& own = stages_[rank_of_[stage]];
      chunk_of_.push_back(static_cast<int>(own.size()));
      own.push_back(stage);
    }
    const std::size_t plain = static_cast<std::size_t>(num_stages_);
    width_ = m_ > 1 && activation_.size() == plain * m_ ? m_ : 1;
    slots_.assign(m_, 0);
    if (width_ > 1) reset_slots();
    if (links_.empty()) {
      for (int kind = 0; kind < 2; ++kind) {
        for (int producer = 0; producer < num_stages_; ++producer) {
          const int consumer = kind == 0 ? producer + 1 : producer - 1;
          const bool crosses = consumer >= 0 && consumer < num_stages_ && rank_of_[producer] != rank_of_[consumer];
          links_.insert(links_.end(), width_, crosses ? comm_ms : 0.0);
        }
      }
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

  Order anneal(const Order& order, const std::vector<double>& patience, std::uint64_t seed, double budget, double temperature) {
    return improve(order, patience, slots_, seed, budget, temperature, false, false).first;
  }

  std::pair<Order, std::vector<int>> assign(const Order& order, const std::vector<double>& patience,
                                            const std::vector<int>& assignment, std::uint64_t seed, double budget,
                                            double temperature, bool fixed_order) {
    return improve(order, patience, assignment, seed, budget, temperature, true, fixed_order);
  }

 private:
  // Index into costs per microbatch of the plan's microbatch `count`; 0 where all microbatches are equal.
  int at(int list, int count) const { return list * width_ + slots_[count]; }

  // Equal microbatches have one column of costs, whatever the assignment.
  void take_slots(const std::vector<int>& assignment) {
    if (width_ > 1) slots_ = assignment;
  }

  void reset_slots() {
    for (int slot = 0; slot < m_; ++slot) slots_[slot] = width_ > 1 ? slot : 0;
  }

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

  // `assign`, or with `assigns` false `anneal`, which leaves the assignment as it is.
  std::pair<Order, std::vector<int>> improve(const Order& order, const std::vector<double>& patience_of,
                                             const std::vector<int>& assignment, std::uint64_t seed, double budget,
                                             double temperature, bool assigns, bool fixed_order) {
    Random random(seed);
    std::vector<int> chunks;
    for (const auto& own : stages_) chunks.push_back(static_cast<int>(own.size()));
    const Moves moves(m_, std::move(chunks));
    take_slots(assignment);
    Order rows = order, best = order;
    std::vector<double> patience = patience_of, best_patience = patience_of, saved;
    std::vector<int> best_slots = assignment, previous;
    const bool filled = std::any_of(patience.begin(), patience.end(), [](double value) { return value < kInfinity; });
    const int kinds = filled ? 2 : 3;
    const double shift_share = assigns ? kLateMoveShare : filled ? kShiftShare : kPlainShiftShare;
    auto [score, objective] = run(rows, patience, nullptr);
    double best_score = objective < kInfinity ? score : kInfinity;
    if (score == kInfinity || (fixed_order && width_ == 1)) budget = 0.0;
    if (budget > 0) find_critical(rows);
    const double begin = work;
    Changes changed;
    while (work - begin < budget) {
      const double left = 1.0 - (work - begin) / budget;
      changed.clear();
      saved.clear();
      previous.clear();
      const double choice = random.unit();
      if (fixed_order || (assigns && width_ > 1 && choice < kAssignShare)) {
        previous = slots_;
        moves.reassign(slots_, random);
      } else {
        const double kind = assigns ? random.unit() : choice;
        if (filled && kind < kPatienceShare) {
          saved = patience;
          moves.vary_patience(patience, random);
        } else if (kind < kSwapShare) {
          moves.repeated_swap(rows, kinds, random, changed);
        } else if (kind < shift_share) {
          moves.repeated_shift(rows, random, changed);
        } else {
          moves.single_move(rows, critical_, random, changed);
        }
      }
      work += kMoveWeight;
      if (changed.empty() && saved.empty() && previous.empty()) continue;
      for (auto& [rank, row] : changed) {
        rows[rank].swap(row);
        work += static_cast<double>(rows[rank].size());
      }
      const auto [candidate, reached] = run(rows, patience, nullptr);
      if (candidate <= score + temperature * left * left * random.unit()) {
        score = candidate;
        find_critical(rows);
        if (reached < kInfinity && score < best_score) {
          best = rows;
          best_patience = patience;
          if (width_ > 1) best_slots = slots_;
          best_score = score;
        }
      } else {
        for (auto& [rank, row] : changed) rows[rank].swap(row);
        if (!saved.empty()) patience.swap(saved);
        if (!previous.empty()) slots_.swap(previous);
      }
    }
    take_slots(best_slots);
    Order found = fill(best, best_patience);
    reset_slots();
    return {std::move(found), std::move(best_slots)};
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
  std::vector<double> durations_, activation_, remaining_, links_;
  double limit_;
  bool makespan_;
  double excess_ms_;
  int width_ = 1;
  std::vector<int> slots_;
  std::vector<double> ends_, free_, first_, held_;
  std::vector<long> awaited_;
  std::vector<std::vector<long>> bound_;
  std::vector<int> step_of_;
  Critical critical_;
  std::vector<int> position_, stack_;
  std::vector<std::vector<int>> counts_;
};

// Run what takes long, so that a planner thread does not stop the others of its process. A core belongs to one thread.
template <typename Function>
auto without_gil(Function function) {
  const py::gil_scoped_release released;
  return function();
}

std::vector<py::bytes> to_bytes(const Order& order) {
  std::vector<py::bytes> rows;
  for (const Row& row : order) rows.emplace_back(row);
  return rows;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled twin of core.py";
  py::class_<NativeCore>(module, "NativeCore")
      .def(py::init<int, std::vector<int>, std::vector<double>, double, std::vector<double>, std::vector<double>, double, bool,
                    std::vector<double>, double>(),
           py::arg("num_microbatches"), py::arg("stage_to_rank"), py::arg("durations"), py::arg("comm_ms"), py::arg("activation"),
           py::arg("remaining"), py::arg("limit"), py::arg("makespan"), py::arg("links") = std::vector<double>(),
           py::arg("excess_ms") = 0.0)
      .def_readwrite("work", &NativeCore::work)
      .def("evaluate", &NativeCore::evaluate)
      .def("evaluate_assigned", &NativeCore::evaluate_assigned)
      .def("fill_assigned", [](NativeCore& core, const Order& rows, const std::vector<double>& patience,
                               const std::vector<int>& assignment) {
             return to_bytes(core.fill_assigned(rows, patience, assignment));
           })
      .def("assign", [](NativeCore& core, const Order& rows, const std::vector<double>& patience, const std::vector<int>& assignment,
                        std::uint64_t seed, double budget, double temperature, bool fixed_order) {
             const auto found = without_gil([&] {
               return core.assign(rows, patience, assignment, seed, budget, temperature, fixed_order);
             });
             return std::make_pair(to_bytes(found.first), found.second);
           })
      .def("decode", [](NativeCore& core, const PolicyTuple& policy) { return to_bytes(core.decode(from_tuple(policy))); })
      .def("fill", [](NativeCore& core, const Order& rows,
                      const std::vector<double>& patience) { return to_bytes(core.fill(rows, patience)); })
      .def("anneal", [](NativeCore& core, const Order& rows, const std::vector<double>& patience, std::uint64_t seed, double budget,
                        double temperature) {
             return to_bytes(without_gil([&] { return core.anneal(rows, patience, seed, budget, temperature); }));
           });
}
