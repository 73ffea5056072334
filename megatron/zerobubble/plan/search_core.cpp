// The inner loop of the search, compiled. Twin of search_core.py, which explains it: the same arithmetic in the same order
// and the same random numbers, so that the same seed gives the same plan. Build without contraction of a*b+c.

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

namespace py = pybind11;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = 1e-9;
constexpr double kDecodeWeight = 8;
constexpr double kMeanWeight = 0.1;

using Row = std::string;
using Order = std::vector<Row>;
using Changes = std::vector<std::pair<int, Row>>;

struct Policy {
  std::vector<double> durations;
  double comm_ms;
  std::vector<double> offsets;
  std::vector<double> caps;
  double period;
  double wait_weight;
  double max_wait;
};

using PolicyTuple =
    std::tuple<std::vector<double>, double, std::vector<double>, std::vector<double>, double, double, double>;

Policy from_tuple(const PolicyTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t), std::get<5>(t), std::get<6>(t)};
}

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
  double unit() { return static_cast<double>(bits() >> 11) * (1.0 / 9007199254740992.0); }
  int below(int limit) { return static_cast<int>(bits() % static_cast<std::uint64_t>(limit)); }

 private:
  std::uint64_t state_;
};

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
    position_.resize(p_);
    free_.resize(p_);
    first_.resize(p_);
    counts_.resize(p_);
  }

  double work = 0.0;

  std::pair<double, double> evaluate(const Order& order) {
    const int S = num_stages_, m = m_;
    ends_.assign(static_cast<std::size_t>(2) * S * m, -1.0);
    stack_.clear();
    double total = 0, done = 0;
    for (int rank = p_ - 1; rank >= 0; --rank) {
      stack_.push_back(rank);
      awaited_[rank] = -1;
      position_[rank] = 0;
      free_[rank] = 0.0;
      first_[rank] = 0.0;
      counts_[rank].assign(3 * stages_[rank].size(), 0);
      total += static_cast<double>(order[rank].size());
    }
    while (!stack_.empty()) {
      const int rank = stack_.back();
      stack_.pop_back();
      const Row& row = order[rank];
      const int length = static_cast<int>(row.size()), begin = position_[rank];
      const int* own = stages_[rank].data();
      int* counts = counts_[rank].data();
      double now = free_[rank];
      int step = begin;
      for (; step < length; ++step) {
        const int code = row[step], chunk = code / 3, kind = code - 3 * chunk, stage = own[chunk], count = counts[code];
        const int producer = kind == 0 ? stage - 1 : stage + 1;
        double start = now;
        if (kind < 2 && producer >= 0 && producer < S) {
          const long key = (static_cast<long>(kind) * S + producer) * m + count;
          double ready = ends_[key];
          if (ready < 0) {
            awaited_[rank] = key;
            break;
          }
          if (rank_of_[producer] != rank) ready += comm_ms_;
          if (ready > start) start = ready;
        }
        if (step == 0) first_[rank] = start;
        now = start + durations_[3 * stage + kind];
        counts[code] = count + 1;
        if (kind < 2) {
          const long key = (static_cast<long>(kind) * S + stage) * m + count;
          ends_[key] = now;
          const int consumer = kind == 0 ? stage + 1 : stage - 1;
          if (consumer >= 0 && consumer < S && awaited_[rank_of_[consumer]] == key) {
            awaited_[rank_of_[consumer]] = -1;
            stack_.push_back(rank_of_[consumer]);
          }
        }
      }
      position_[rank] = step;
      free_[rank] = now;
      done += step - begin;
    }
    work += total;
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

  Policy tune(const Policy& policy, std::uint64_t seed, double budget, double temperature) {
    Random random(seed);
    Policy current = policy, best = policy;
    double score = policy_score(policy), best_score = score;
    const double begin = work;
    while (work - begin < budget) {
      const double left = 1.0 - (work - begin) / budget;
      Policy candidate = varied(current, policy.period, random);
      const double candidate_score = policy_score(candidate);
      if (candidate_score <= score + temperature * left * left * random.unit()) {
        current = std::move(candidate);
        score = candidate_score;
        if (score < best_score) {
          best = current;
          best_score = score;
        }
      }
    }
    return best;
  }

  Order anneal(const Order& order, std::uint64_t seed, double budget, double temperature) {
    Random random(seed);
    Order rows = order, best = order;
    double score = evaluate(rows).first, best_score = score;
    const double begin = work;
    Changes changed;
    while (work - begin < budget) {
      const double left = 1.0 - (work - begin) / budget;
      changed.clear();
      if (random.unit() < 0.1) {
        repeated_swap(rows, random, changed);
      } else {
        single_move(rows, random, changed);
      }
      work += 8;
      if (changed.empty()) continue;
      bool fits = true;
      for (auto& [rank, row] : changed) {
        rows[rank].swap(row);
        work += static_cast<double>(rows[rank].size());
      }
      for (const auto& change : changed) {
        if (!row_is_valid(change.first, rows[change.first])) {
          fits = false;
          break;
        }
      }
      const double candidate = fits ? evaluate(rows).first : kInfinity;
      if (candidate <= score + temperature * left * left * random.unit()) {
        score = candidate;
        if (score < best_score) {
          best = rows;
          best_score = score;
        }
      } else {
        for (auto& [rank, row] : changed) rows[rank].swap(row);
      }
    }
    return best;
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
    if (held + activation_[stage] > limit_ + kEpsilon) return false;
    const int passed = chunk < last ? counts[3 * own[chunk + 1]] : counts[3 * stage + 1];
    if (counts[3 * stage] - passed >= policy.caps[stage]) return false;
    for (int c = chunk; c < last; ++c) {
      double waiting = activation_[stage];
      const int beyond = counts[3 * own[c + 1]];
      for (int k = 0; k <= c; ++k) waiting += (counts[3 * own[k]] - beyond) * activation_[own[k]];
      for (int k = c + 1; k <= last; ++k) waiting += activation_[own[k]];
      if (waiting > limit_ + kEpsilon) return false;
    }
    return true;
  }

  double policy_score(const Policy& policy) {
    const Order order = decode(policy);
    work += 8;
    return order.empty() ? kInfinity : evaluate(order).first;
  }

  Policy varied(const Policy& policy, double period, Random& random) const {
    Policy result = policy;
    const double choice = random.unit();
    if (choice >= 0.96) {
      result.max_wait = random.unit() * period * 0.3;
      return result;
    }
    if (choice >= 0.93) {
      result.period = period * (0.95 + 0.45 * random.unit());
      return result;
    }
    if (choice >= 0.9) {
      result.wait_weight = random.unit() * 3.0;
      return result;
    }
    const int kind = random.below(3);
    int first = random.below(num_stages_), last = first;
    if (random.unit() >= 0.5) {
      const int other = random.below(num_stages_);
      last = std::max(first, other);
      first = std::min(first, other);
    }
    if (choice < 0.6) {
      const double scale = random.unit();
      const double change = (random.unit() - 0.5) * 2.0 * period * (scale * scale);
      const bool ramp = random.unit() < 0.3;
      for (int stage = first; stage <= last; ++stage) {
        const double share = ramp ? static_cast<double>(stage - first + 1) / (last - first + 1) : 1.0;
        result.offsets[3 * stage + kind] += change * share;
      }
      return result;
    }
    const double step = random.below(2) ? 1.0 : -1.0;
    for (int stage = first; stage <= last; ++stage) result.caps[stage] = std::max(1.0, result.caps[stage] + step);
    return result;
  }

  void single_move(const Order& rows, Random& random, Changes& changed) const {
    const int rank = random.below(p_);
    const Row& row = rows[rank];
    const int length = static_cast<int>(row.size());
    const int source = random.below(length);
    const double scale = random.unit();
    const int distance = 1 + static_cast<int>(scale * scale * scale * (3 * static_cast<int>(stages_[rank].size()) + 6));
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

  void repeated_swap(const Order& rows, Random& random, Changes& changed) const {
    int first = random.below(p_), last = first;
    const double choice = random.unit();
    if (choice < 0.3) {
      first = 0;
      last = p_ - 1;
    } else if (choice < 0.6) {
      last = std::min(p_ - 1, first + 1 + random.below(p_));
    }
    const int num_codes = 3 * static_cast<int>(stages_[first].size());
    const int before = random.below(num_codes), after = random.below(num_codes);
    const int length = static_cast<int>(rows[first].size());
    int low = random.below(length), high = random.below(length);
    if (low > high) std::swap(low, high);
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

  bool row_is_valid(int rank, const Row& row) {
    valid_counts_.assign(3 * stages_[rank].size(), 0);
    double held = 0.0;
    for (const char code : row) {
      const int chunk = code / 3, kind = code - 3 * chunk, stage = stages_[rank][chunk];
      ++valid_counts_[code];
      if (kind == 0) {
        held += activation_[stage];
        if (held > limit_ + kEpsilon) return false;
      } else {
        if (valid_counts_[code] > valid_counts_[code - 1]) return false;
        held -= kind == 1 ? activation_[stage] - remaining_[stage] : remaining_[stage];
      }
    }
    return true;
  }

  int m_, p_, num_stages_;
  std::vector<int> rank_of_, chunk_of_;
  std::vector<std::vector<int>> stages_;
  std::vector<double> durations_;
  double comm_ms_;
  std::vector<double> activation_, remaining_;
  double limit_;
  bool makespan_;
  std::vector<double> ends_, free_, first_;
  std::vector<long> awaited_;
  std::vector<int> position_, stack_, valid_counts_;
  std::vector<std::vector<int>> counts_;
};

std::vector<py::bytes> to_bytes(const Order& order) {
  std::vector<py::bytes> rows;
  for (const Row& row : order) rows.emplace_back(row);
  return rows;
}

}  // namespace

PYBIND11_MODULE(_search_core, module) {
  module.doc() = "Compiled twin of search_core.py";
  py::class_<NativeCore>(module, "NativeCore")
      .def(py::init<int, std::vector<int>, std::vector<double>, double, std::vector<double>, std::vector<double>, double, bool>())
      .def_readwrite("work", &NativeCore::work)
      .def("evaluate", &NativeCore::evaluate)
      .def("decode", [](NativeCore& core, const PolicyTuple& policy) { return to_bytes(core.decode(from_tuple(policy))); })
      .def("tune",
           [](NativeCore& core, const PolicyTuple& policy, std::uint64_t seed, double budget, double temperature) {
             const Policy best = core.tune(from_tuple(policy), seed, budget, temperature);
             return PolicyTuple(best.durations, best.comm_ms, best.offsets, best.caps, best.period, best.wait_weight,
                                best.max_wait);
           })
      .def("anneal", [](NativeCore& core, const Order& order, std::uint64_t seed, double budget, double temperature) {
        return to_bytes(core.anneal(order, seed, budget, temperature));
      });
}
