#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "cpu/counters.h"
#include "cpu/stages.h"
#include "cpu/worker_pool.h"
#include "group/cpu_group.h"
#include "schedule/queue.h"

namespace uniep::cpu {

/// Runs a pass's launches on this rank's worker threads: takes tasks from the queues in order,
/// waits for their inputs, runs their stage routine, signals what they finished.
class Engine {
 public:
  Engine(CpuGroup& group, int rank, Counters& counters, const LayerOptions& options);

  /// Publishes the staged tokens, where the pass moves any, and runs it; throws the first error of
  /// any worker, after all have stopped.
  void run(const PassContext& ctx, PassStats& stats, std::vector<TimelineEvent>* timeline);

 private:
  struct Worker {
    int index = 0;
    Scratch scratch;
    std::deque<Clock::time_point> pushes;        // when those under way arrive, oldest first
    std::optional<Clock::time_point> last_pull;  // arrival, where the last task was a pull too
    std::minstd_rand delays;
    std::array<StageStats, kMaxStages> stats{};
    std::vector<TimelineEvent> events;
  };

  /// What one task signals to other ranks over an emulated link, rank after rank.
  struct Delivery {
    int rank = -1;
    std::int64_t bytes = 0;  // that were pushed there
    std::vector<SignalCourier::Add> adds;
    std::optional<Clock::time_point> arrival;  // of all that was sent before
  };

  /// A queue that the workers of a launch share.
  struct SharedQueue {
    QueueView view;
    std::atomic<std::int64_t> next{0};
  };

  int num_workers(const Schedule& schedule) const;
  void publish(const PassView& view);
  void run_launch(const PassContext& ctx, int launch, int workers, bool record);
  void drain(const PassContext& ctx, SharedQueue& queue, Worker& worker, int launch, bool record);
  TimelineEvent run_task(const PassContext& ctx, const Task& task, Worker& worker, int launch);
  void execute(const PassContext& ctx, const Task& task, Worker& worker, TimelineEvent& event);
  void wait_for_inputs(const PassContext& ctx, const Task& task, Worker& worker);
  void wait_for(const Wait& wait, const Task& task);
  void wait_for_pulls(const PassContext& ctx, const Task& task, Worker& worker);
  void signal(const PassContext& ctx, const Task& task, Worker& worker);
  void deliver(Delivery& delivery);
  void put(const PassContext& ctx, const Task& task, Worker& worker);
  int here(int rank) const;
  void limit_pushes(const PassContext& ctx, Worker& worker);
  void sleep_until(Clock::time_point when);
  void random_delay(Worker& worker);
  bool withheld(const Task& task) const;
  void fail(std::exception_ptr error);

  CpuGroup& group_;
  const int rank_;
  Counters& counters_;
  const FaultInjection fault_injection_;
  const int timeout_ms_;
  WorkerPool pool_;
  std::deque<Worker> workers_;  // a deque: Worker does not move
  std::mutex error_mutex_;
  std::exception_ptr error_;
  bool error_is_original_ = false;
};

}  // namespace uniep::cpu
