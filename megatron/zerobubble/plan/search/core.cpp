// The inner loop of the search, compiled: annealing, and what Python sees of it all. With its headers it is the twin of core.py,
// which documents it: the same arithmetic in the same order and the same random numbers, so that the same seed gives the same
// plan. Build without floating-point contraction (a*b+c).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "decode.hpp"
#include "evaluate.hpp"
#include "moves.hpp"

namespace py = pybind11;

namespace {

constexpr double kMoveWeight = 40;
constexpr double kPatienceShare = 0.05;
constexpr double kSwapShare = 0.1;
constexpr double kShiftShare = 0.9;
constexpr double kPlainShiftShare = 0.2;
constexpr double kAssignShare = 0.8;
constexpr double kLateMoveShare = 0.5;

using zerobubble::Changes;
using zerobubble::from_tuple;
using zerobubble::kCertain;
using zerobubble::kInfinity;
using zerobubble::ListScheduler;
using zerobubble::Moves;
using zerobubble::Order;
using zerobubble::PolicyTuple;
using zerobubble::Random;
using zerobubble::Row;

// `Problem` of interface.py.
using ProblemTuple = std::tuple<int, std::vector<int>, std::vector<double>, double, std::vector<double>, std::vector<double>, double,
                                bool, std::vector<double>, std::vector<double>, double>;

class NativeCore : public ListScheduler {
 public:
  using ListScheduler::ListScheduler;

  // From any thread: what anneals ends at its next move, now and from now on.
  void stop() { stopped_ = true; }

  Order anneal(const Order& order, const std::vector<double>& patience, std::uint64_t seed, double budget, double temperature) {
    return improve(order, patience, slots_, seed, budget, temperature, false, false).first;
  }

  std::pair<Order, std::vector<int>> assign(const Order& order, const std::vector<double>& patience,
                                            const std::vector<int>& assignment, std::uint64_t seed, double budget,
                                            double temperature, bool fixed_order) {
    return improve(order, patience, assignment, seed, budget, temperature, true, fixed_order);
  }

 private:
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
    auto [score, objective] = run<true>(rows, patience, nullptr);
    double best_score = objective < kInfinity ? score : kInfinity;
    if (score == kInfinity || (fixed_order && width_ == 1)) budget = 0.0;
    if (budget > 0) find_critical(rows);
    const double begin = work;
    Changes changed;
    while (work - begin < budget && !stopped_.load(std::memory_order_relaxed)) {
      const double left = 1.0 - (work - begin) / budget;
      changed.clear();
      saved.clear();
      previous.clear();
      double since = -kInfinity;
      const double choice = random.unit();
      if (fixed_order || (assigns && width_ > 1 && choice < kAssignShare)) {
        previous = slots_;
        moves.reassign(slots_, random);
        since = time_before_microbatch(first_difference(previous, slots_));
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
      if (!changed.empty()) since = kInfinity;
      for (auto& [rank, row] : changed) {
        since = std::min(since, time_before(rank, first_difference(rows[rank], row)));
        rows[rank].swap(row);
        work += static_cast<double>(rows[rank].size());
      }
      const double most = score + temperature * left * left * random.unit();
      const auto [candidate, reached] = run<false>(rows, patience, nullptr, since, most * kCertain);
      if (candidate <= most) {
        score = candidate;
        const double charged = work;
        run<true>(rows, patience, nullptr, since);
        work = charged;
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

  template <typename Sequence>
  static int first_difference(const Sequence& before, const Sequence& after) {
    return static_cast<int>(std::mismatch(before.begin(), before.end(), after.begin()).first - before.begin());
  }

  std::atomic<bool> stopped_{false};
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
      .def(py::init([](const ProblemTuple& problem) {
             return std::apply([](const auto&... fields) { return std::make_unique<NativeCore>(fields...); }, problem);
           }),
           py::arg("problem"))
      .def_readwrite("work", &NativeCore::work)
      .def("stop", &NativeCore::stop)
      .def("evaluate", [](NativeCore& core, const Order& rows) { return without_gil([&] { return core.evaluate(rows); }); })
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
      .def("decode", [](NativeCore& core, const PolicyTuple& policy) {
             return to_bytes(without_gil([&] { return core.decode(from_tuple(policy)); }));
           })
      .def("fill", [](NativeCore& core, const Order& rows, const std::vector<double>& patience) {
             return to_bytes(without_gil([&] { return core.fill(rows, patience); }));
           })
      .def("anneal", [](NativeCore& core, const Order& rows, const std::vector<double>& patience, std::uint64_t seed, double budget,
                        double temperature) {
             return to_bytes(without_gil([&] { return core.anneal(rows, patience, seed, budget, temperature); }));
           });
}
