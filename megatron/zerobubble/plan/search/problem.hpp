// What a core plans for: the placement, flat costs, and the memory limit. See core.py.

#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace zerobubble {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = 1e-9;

class Problem {
 public:
  Problem(int num_microbatches, int num_slices, std::vector<int> counts, std::vector<int> stage_to_rank,
          std::vector<double> durations, double comm_ms, std::vector<double> activation, std::vector<double> remaining, double limit, bool makespan,
          std::vector<double> links, std::vector<double> busy, double excess_ms)
      : m_(counts.empty() ? num_microbatches * num_slices : std::accumulate(counts.begin(), counts.end(), 0)),
        n_(num_slices),
        counts_(std::move(counts)),
        rank_of_(std::move(stage_to_rank)),
        durations_(std::move(durations)),
        activation_(std::move(activation)),
        remaining_(std::move(remaining)),
        links_(std::move(links)),
        busy_(std::move(busy)),
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
    const bool has_columns = !counts_.empty() || (n_ == 1 && m_ > 1 && activation_.size() == plain * m_);
    is_unequal_ = has_columns && num_microbatches > 1;
    width_ = has_columns ? m_ : n_;
    for (const int count : counts_) starts_.push_back(starts_.back() + count);
    for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) own_.push_back(microbatch);
    for (int number = 0; number < m_; ++number) forward_of_.push_back(number + n_ - 1 - 2 * (number % n_));
    if (links_.empty()) {
      for (int kind = 0; kind < 2; ++kind) {
        for (int producer = 0; producer < num_stages_; ++producer) {
          const int consumer = kind == 0 ? producer + 1 : producer - 1;
          const bool crosses = consumer >= 0 && consumer < num_stages_ && rank_of_[producer] != rank_of_[consumer];
          links_.insert(links_.end(), width_, crosses ? comm_ms : 0.0);
        }
      }
    }
  }

  double work = 0.0;

 protected:
  int m_, n_, p_, num_stages_;  // m_ counts slices, n_ those of a microbatch
  std::vector<int> counts_, starts_{0};  // slices of each unequal microbatch, and the first column of each; no counts: n_ of each
  std::vector<int> own_;  // the assignment that leaves microbatches as they are
  bool is_unequal_ = false;  // whether microbatches have columns of their own
  std::vector<int> forward_of_;  // number of a B or W -> number of the F that it belongs to
  std::vector<int> rank_of_, chunk_of_;
  std::vector<std::vector<int>> stages_;
  std::vector<double> durations_, activation_, remaining_, links_, busy_;
  double limit_;
  bool makespan_;
  double excess_ms_;
  int width_ = 1;  // columns of costs: one per slice, one per microbatch, or one for all
};

}  // namespace zerobubble
