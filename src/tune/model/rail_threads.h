#pragma once

#include <vector>

#include "schedule/block_tasks.h"
#include "tune/model/cores.h"
#include "tune/model/network.h"
#include "tune/model/ring.h"

namespace uniep::tune {

/// What a task for another host sends.
struct Message {
  int from = 0;  ///< index among the simulated ranks
  int to = 0;    ///< likewise; where one host stands for all, `from`
  Task task{};
  double bytes = 0;
};

/// The threads that drive the network, one a rank, beside its workers on the same cores. Each takes
/// one message after another: those that its rank sends, and those that have come.
class RailThreads {
 public:
  struct Job {
    int message = 0;  ///< number
    bool comes = false;
  };

  RailThreads(const Topology& topology, std::size_t ranks)
      : message_s_(topology.message_s), byte_s_(topology.message_byte_s), queues_(ranks) {}

  /// Whether messages take a thread's time at all.
  bool enabled() const { return message_s_ > 0 || byte_s_ > 0; }

  /// The number of a new message.
  int add(const Message& message) {
    messages_.push_back(message);
    return static_cast<int>(messages_.size()) - 1;
  }
  const Message& operator[](int number) const {
    return messages_[static_cast<std::size_t>(number)];
  }

  void take(Job job, double now, Cores& cores) {
    Ring<Job>& queue = queue_of(rank_of(job));
    queue.push_back(job);
    if (queue.size() == 1) start(queue.front(), now, cores);
  }
  /// The job that is done of the rank whose thread `unit` of the cores is.
  Job finish(int unit, double now, Cores& cores) {
    Ring<Job>& queue = queue_of(~unit);
    const Job done = queue.front();
    queue.pop_front();
    if (!queue.empty()) start(queue.front(), now, cores);
    return done;
  }
  /// Whether that is one of these threads, and no worker.
  static bool is_rail(int unit) { return unit < 0; }

 private:
  int rank_of(Job job) const {
    const Message& message = (*this)[job.message];
    return job.comes ? message.to : message.from;
  }
  Ring<Job>& queue_of(int rank) { return queues_[static_cast<std::size_t>(rank)]; }

  void start(Job job, double now, Cores& cores) const {
    const double work = message_s_ + byte_s_ * (*this)[job.message].bytes;
    cores.start(~rank_of(job), work, now);
  }

  double message_s_, byte_s_;
  std::vector<Message> messages_;
  std::vector<Ring<Job>> queues_;  // by rank; the first is at work
};

}  // namespace uniep::tune
