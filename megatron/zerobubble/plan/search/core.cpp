// The inner loop of the search: annealing, and the C functions that core.py, which documents it, calls. Build without
// floating-point contraction (a*b+c), so that the same seed gives the same plan on every machine.

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "decode.hpp"
#include "evaluate.hpp"
#include "moves.hpp"

namespace {

// Op evaluations charged for choosing a move.
constexpr double kMoveWeight = 40;

// Upper ends of the shares of moves: patience (without W only), repeated swaps, repeated shifts (without W, with W); the rest are
// single moves.
constexpr double kPatienceShare = 0.05;
constexpr double kSwapShare = 0.1;
constexpr double kShiftShare = 0.9;
constexpr double kPlainShiftShare = 0.2;

// With unequal microbatches: share of moves that change the assignment, and upper end of the share of repeated shifts among the
// others.
constexpr double kAssignShare = 0.8;
constexpr double kLateMoveShare = 0.5;

using zerobubble::Changes;
using zerobubble::kCertain;
using zerobubble::kInfinity;
using zerobubble::ListScheduler;
using zerobubble::Moves;
using zerobubble::Order;
using zerobubble::Policy;
using zerobubble::Random;
using zerobubble::Row;

class Core : public ListScheduler {
 public:
  using ListScheduler::ListScheduler;

  // From any thread: what anneals ends at its next move, now and from now on.
  void stop() { stopped_ = true; }

  Order anneal(const Order& order, const std::vector<double>& patience, std::uint64_t seed, double budget, double temperature) {
    return improve(order, patience, own_, seed, budget, temperature, false, false).first;
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
    take(assignment);
    Order rows = order, best = order;
    std::vector<double> patience = patience_of, best_patience = patience_of, saved;
    std::vector<int> assigned = assignment, best_assigned = assignment, previous;
    const bool filled = std::any_of(patience.begin(), patience.end(), [](double value) { return value < kInfinity; });
    const int kinds = filled ? 2 : 3;
    const double shift_share = assigns ? kLateMoveShare : filled ? kShiftShare : kPlainShiftShare;
    auto [score, objective] = run<true>(rows, patience, nullptr);
    double best_score = objective < kInfinity ? score : kInfinity;
    if (score == kInfinity || (fixed_order && !is_unequal_)) budget = 0.0;
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
      if (fixed_order || (assigns && is_unequal_ && choice < kAssignShare)) {
        previous = assigned;
        moves.reassign(assigned, random);
        take(assigned);
        since = time_before_forward(first_changed(previous, assigned));
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
      assert(is_as_whole(rows, patience, candidate, reached, most));
      if (candidate <= most) {
        score = candidate;
        const double charged = work;
        run<true>(rows, patience, nullptr, since);
        work = charged;
        find_critical(rows);
        if (reached < kInfinity && score < best_score) {
          best = rows;
          best_patience = patience;
          best_assigned = assigned;
          best_score = score;
        }
      } else {
        for (auto& [rank, row] : changed) rows[rank].swap(row);
        if (!saved.empty()) patience.swap(saved);
        if (!previous.empty()) {
          assigned.swap(previous);
          take(assigned);
        }
      }
    }
    take(best_assigned);
    Order found = fill(best, best_patience);
    take(own_);
    return {std::move(found), std::move(best_assigned)};
  }

  // Whether a run that began late and may have ended early gave what a run of the whole order gives. Only with assertions.
  [[maybe_unused]] bool is_as_whole(const Order& rows, const std::vector<double>& patience, double score, double objective,
                                    double most) {
    const double charged = work;
    const auto whole = run<false>(rows, patience, nullptr);
    work = charged;
    return score <= most ? whole == std::pair(score, objective) : whole.first > most;
  }

  static int first_difference(const Row& before, const Row& after) {
    return static_cast<int>(std::mismatch(before.begin(), before.end(), after.begin()).first - before.begin());
  }

  std::atomic<bool> stopped_{false};
};

// An array and what is left of it.
class Doubles {
 public:
  explicit Doubles(const double* values) : values_(values) {}

  std::vector<double> next(int count) {
    std::vector<double> taken(values_, values_ + count);
    values_ += count;
    return taken;
  }

 private:
  const double* values_;
};

// Op codes per rank, one rank after the other.
Order rows_of(const char* codes, const int* lengths, int num_ranks) {
  Order rows;
  for (int rank = 0; rank < num_ranks; codes += lengths[rank++]) rows.emplace_back(codes, codes + lengths[rank]);
  return rows;
}

// Returns the number of ranks: none where no order was found.
int write(const Order& order, char* codes, int* lengths) {
  for (const Row& row : order) {
    std::memcpy(codes, row.data(), row.size());
    codes += row.size();
    *lengths++ = static_cast<int>(row.size());
  }
  return static_cast<int>(order.size());
}

std::vector<int> ints_of(const int* values, int count) { return {values, values + count}; }

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Each takes a core first, but for the first. Orders go in and out as the codes of all ranks in turn and the number per rank; the
// caller's buffers for results hold every op. The arguments are those of the methods of core.py.

EXPORTED Core* zb_new(int num_microbatches, int num_slices, const int* counts, int num_counts, int num_stages,
                            const int* stage_to_rank, const double* lists, const int* sizes, double comm_ms, double limit,
                            int is_makespan, double excess_ms) {
  Doubles values(lists);
  auto durations = values.next(sizes[0]), activation = values.next(sizes[1]), remaining = values.next(sizes[2]);
  auto links = values.next(sizes[3]), busy = values.next(sizes[4]);
  return new Core(num_microbatches, num_slices, ints_of(counts, num_counts), ints_of(stage_to_rank, num_stages),
                        std::move(durations), comm_ms, std::move(activation), std::move(remaining), limit, is_makespan != 0,
                        std::move(links), std::move(busy), excess_ms);
}

EXPORTED void zb_delete(Core* core) { delete core; }

EXPORTED double* zb_work(Core* core) { return &core->work; }

EXPORTED void zb_stop(Core* core) { core->stop(); }

EXPORTED void zb_evaluate(Core* core, const char* codes, const int* lengths, int num_ranks, double* result) {
  std::tie(result[0], result[1]) = core->evaluate(rows_of(codes, lengths, num_ranks));
}

EXPORTED void zb_evaluate_assigned(Core* core, const char* codes, const int* lengths, int num_ranks, const double* patience,
                                   const int* assignment, int num_assigned, double* result) {
  const auto rows = rows_of(codes, lengths, num_ranks);
  const auto patience_of = Doubles(patience).next(num_ranks);
  std::tie(result[0], result[1]) = core->evaluate_assigned(rows, patience_of, ints_of(assignment, num_assigned));
}

EXPORTED int zb_fill(Core* core, const char* codes, const int* lengths, int num_ranks, const double* patience, char* found,
                      int* found_lengths) {
  return write(core->fill(rows_of(codes, lengths, num_ranks), Doubles(patience).next(num_ranks)), found, found_lengths);
}

EXPORTED int zb_fill_assigned(Core* core, const char* codes, const int* lengths, int num_ranks, const double* patience,
                               const int* assignment, int num_assigned, char* found, int* found_lengths) {
  const auto rows = rows_of(codes, lengths, num_ranks);
  const auto patience_of = Doubles(patience).next(num_ranks);
  return write(core->fill_assigned(rows, patience_of, ints_of(assignment, num_assigned)), found, found_lengths);
}

EXPORTED int zb_decode(Core* core, const double* lists, const int* sizes, const double* numbers, char* found,
                        int* found_lengths) {
  Doubles values(lists);
  Policy policy;
  policy.durations = values.next(sizes[0]);
  policy.offsets = values.next(sizes[1]);
  policy.caps = values.next(sizes[2]);
  policy.comm_ms = numbers[0];
  policy.period = numbers[1];
  policy.wait_weight = numbers[2];
  policy.max_wait = numbers[3];
  policy.limit = numbers[4];
  policy.settled = numbers[5];
  policy.settle_after = numbers[6];
  return write(core->decode(policy), found, found_lengths);
}

EXPORTED int zb_anneal(Core* core, const char* codes, const int* lengths, int num_ranks, const double* patience,
                        std::uint64_t seed, double budget, double temperature, char* found, int* found_lengths) {
  const auto rows = rows_of(codes, lengths, num_ranks);
  return write(core->anneal(rows, Doubles(patience).next(num_ranks), seed, budget, temperature), found, found_lengths);
}

// The assignment is overwritten by the one that was found.
EXPORTED int zb_assign(Core* core, const char* codes, const int* lengths, int num_ranks, const double* patience,
                        int* assignment, int num_assigned, std::uint64_t seed, double budget, double temperature, int fixed_order,
                        char* found, int* found_lengths) {
  const auto rows = rows_of(codes, lengths, num_ranks);
  const auto patience_of = Doubles(patience).next(num_ranks);
  const auto result = core->assign(rows, patience_of, ints_of(assignment, num_assigned), seed, budget, temperature, fixed_order != 0);
  std::copy(result.second.begin(), result.second.end(), assignment);
  return write(result.first, found, found_lengths);
}
