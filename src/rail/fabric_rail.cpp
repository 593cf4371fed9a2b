// A rail over libfabric: message endpoints of its provider `tcp`, driven by a thread of the rail.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "base/deadline.h"
#include "base/descriptor.h"
#include "base/threads.h"
#include "base/wait_error.h"
#include "rail/fabric_connection.h"
#include "rail/port.h"
#include "rail/rail.h"

namespace uniep {
namespace rail {
namespace {

using Clock = std::chrono::steady_clock;
using State = FabricConnection::State;

/// Between looks at whether the group has failed, by the rail's thread and by who connects.
constexpr std::chrono::milliseconds kLongestNap(20);
/// For goodbyes to be sent where the group has failed.
constexpr std::chrono::milliseconds kFarewell(1000);
/// For others to hear why this rail has broken.
constexpr std::chrono::milliseconds kLastWords(300);

class FabricRail final : public Rail {
 public:
  explicit FabricRail(const RailOptions& options);
  ~FabricRail() override;

  std::string address() const override { return address_; }
  void connect(const std::vector<std::string>& addresses, RailWatch watch, int limit_ms) override;
  void attach(std::uint64_t number, RailMemory memory) override;
  void detach(std::uint64_t number) override;
  void put(int host, std::uint64_t number, const RailBlock& block) override;

 private:
  struct Post {
    int host;
    MessageKind kind;
    Bytes body;
  };
  /// What has come in and is yet to take effect: a block, or a host's end behind its last one.
  struct Delivery {
    Clock::time_point due;
    Bytes body;
    int ended_host = -1;
    bool lost = false;
  };

  int own_host() const { return options_.layout.host_of(options_.rank); }
  int local() const { return options_.layout.local_of(options_.rank); }
  int rank_of(int host) const { return options_.layout.rank_at(host, local()); }
  FabricConnection& to(int host) { return connections_[static_cast<std::size_t>(host)]; }

  Info find(const char* node, const char* port, std::uint64_t flags) const;
  void listen();
  void check_group() const;
  Error never_connected(int limit_ms) const;
  void wake();

  // Of the thread.
  void run();
  bool step();
  void begin_connecting();
  bool take_posts();
  bool take_events();
  bool take_completions();
  bool deliver(Clock::time_point now);
  void take_block(const Bytes& body);
  void take_event(std::uint32_t kind, fi_eq_cm_entry& entry, std::size_t bytes);
  void answer_request(fi_info& info, const void* data, std::size_t bytes);
  void take_error();
  void take_message(int host, FabricConnection::Message message);
  void lose(int host);
  void farewell();
  void spread_failure();
  void tell_all(const RailFailure& failure);
  void say_last(const RailFailure& failure) noexcept;
  bool is_done() const { return std::ranges::all_of(connections_, &FabricConnection::is_done); }
  void nap(Clock::time_point now);
  int host_of(const FabricConnection& connection) const {
    return static_cast<int>(&connection - connections_.data());
  }
  FabricConnection* find(const fid* endpoint);

  const RailOptions options_;
  Fid<fid_fabric> fabric_;
  Fid<fid_eq> events_;
  Fid<fid_pep> listener_;
  Fid<fid_domain> domain_;
  Fid<fid_cq> completions_;
  std::string address_;
  Descriptor wake_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;
  std::map<std::uint64_t, RailMemory> memories_;
  std::vector<bool> has_connected_;  // by host; this one has
  std::string broken_;               // why the thread has given up
  std::atomic<bool> leaving_{false};

  // Of the thread, which starts behind these.
  std::vector<std::string> addresses_;  // by rank
  std::chrono::milliseconds limit_{0};  // of waits
  RailWatch watch_;
  std::vector<FabricConnection> connections_;  // by host; that of this one is not used
  std::vector<bool> has_left_;                 // likewise
  std::deque<Delivery> deliveries_;            // by due
  Port out_, in_;
  Clock::time_point next_look_{};
  bool failure_spread_ = false;

  std::thread thread_;  // from `connect` on
};

FabricRail::FabricRail(const RailOptions& options)
    : options_(options),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      has_connected_(static_cast<std::size_t>(options.layout.hosts)),
      connections_(static_cast<std::size_t>(options.layout.hosts)),
      has_left_(static_cast<std::size_t>(options.layout.hosts)),
      out_(options.gigabytes_per_second),
      in_(options.gigabytes_per_second) {
  ensure(wake_.valid(), "no eventfd");
  has_connected_[static_cast<std::size_t>(own_host())] = true;
  listen();
}

Info FabricRail::find(const char* node, const char* port, std::uint64_t flags) const {
  const FabricLibrary& fabric = FabricLibrary::get();
  const Info hints(fabric.dupinfo(nullptr));
  ensure(hints != nullptr, "no memory for hints");
  hints->caps = FI_MSG;
  hints->ep_attr->type = FI_EP_MSG;
  hints->addr_format = FI_SOCKADDR_IN;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->fabric_attr->prov_name = strdup("tcp");
  fi_info* found = nullptr;
  fabric.check(fabric.getinfo(FI_VERSION(1, 17), node, port, flags, hints.get(), &found),
               "fi_getinfo");
  return Info(found);
}

void FabricRail::listen() {
  const FabricLibrary& library = FabricLibrary::get();
  const Info info = find(options_.address.c_str(), "0", FI_SOURCE | FI_NUMERICHOST);
  fid_fabric* fabric = nullptr;
  library.check(library.fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric");
  fabric_.reset(fabric);
  fi_eq_attr events_attr{};
  events_attr.wait_obj = FI_WAIT_FD;
  fid_eq* events = nullptr;
  library.check(fi_eq_open(fabric, &events_attr, &events, nullptr), "fi_eq_open");
  events_.reset(events);
  fid_pep* listener = nullptr;
  library.check(fi_passive_ep(fabric, info.get(), &listener, nullptr), "fi_passive_ep");
  listener_.reset(listener);
  library.check(fi_pep_bind(listener, &events->fid, 0), "fi_pep_bind");
  library.check(fi_listen(listener), "fi_listen");
  fid_domain* domain = nullptr;
  library.check(fi_domain(fabric, info.get(), &domain, nullptr), "fi_domain");
  domain_.reset(domain);
  fi_cq_attr completions_attr{};
  completions_attr.format = FI_CQ_FORMAT_CONTEXT;
  completions_attr.wait_obj = FI_WAIT_FD;
  fid_cq* completions = nullptr;
  library.check(fi_cq_open(domain, &completions_attr, &completions, nullptr), "fi_cq_open");
  completions_.reset(completions);

  sockaddr_in own{};
  std::size_t length = sizeof(own);
  library.check(fi_getname(&listener->fid, &own, &length), "fi_getname");
  address_ = cat(options_.address, ":", ntohs(own.sin_port));
}

void FabricRail::connect(const std::vector<std::string>& addresses, RailWatch watch, int limit_ms) {
  const auto limit = std::chrono::milliseconds(limit_ms);
  addresses_ = addresses;
  limit_ = limit;
  watch_ = std::move(watch);
  thread_ = start_thread([this] { run(); });
  const Deadline end = Deadline::in(limit);
  const auto is_settled = [&] {
    return !broken_.empty() || std::ranges::find(has_connected_, false) == has_connected_.end();
  };
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLongestNap, is_settled)) {
    if (end.expired()) throw never_connected(limit_ms);
    lock.unlock();
    check_group();
    lock.lock();
  }
  require(broken_.empty(), ErrorCode::kDevice, "rank ", options_.rank,
          " has no connection to other hosts: ", broken_);
}

/// Whoever is waited for may have gone, and would else be missed at the limit only.
void FabricRail::check_group() const {
  if (const auto failure = watch_.failure ? watch_.failure() : std::nullopt) {
    throw Error(ErrorCode::kPeerFailed, cat("the group is unusable since rank ", failure->rank,
                                            " failed: ", failure->sentence));
  }
  if (watch_.check) watch_.check();
}

/// To be called under the mutex.
Error FabricRail::never_connected(int limit_ms) const {
  const auto missing = std::ranges::find(has_connected_, false) - has_connected_.begin();
  const auto here = std::ranges::count(has_connected_, true) - 1;
  return wait_error({.rank = options_.rank,
                     .stage = "connect",
                     .tile = -1,
                     .peer = rank_of(static_cast<int>(missing)),
                     .expected = static_cast<std::uint64_t>(options_.layout.hosts - 1),
                     .seen = static_cast<std::uint64_t>(here),
                     .limit_ms = limit_ms},
                    "connections to other hosts");
}

void FabricRail::attach(std::uint64_t number, RailMemory memory) {
  const std::scoped_lock lock(mutex_);
  memories_[number] = std::move(memory);
}

void FabricRail::detach(std::uint64_t number) {
  const std::scoped_lock lock(mutex_);
  memories_.erase(number);
}

void FabricRail::put(int host, std::uint64_t number, const RailBlock& block) {
  Bytes body = pack_block(number, block);
  {
    const std::scoped_lock lock(mutex_);
    posts_.push_back({host, MessageKind::kBlock, std::move(body)});
  }
  wake();
}

void FabricRail::wake() {
  const std::uint64_t one = 1;
  // A full counter wakes, too.
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

FabricRail::~FabricRail() {
  leaving_.store(true);
  wake();
  if (thread_.joinable()) thread_.join();
  for (FabricConnection& connection : connections_) connection.end();
}

void FabricRail::run() {
  try {
    begin_connecting();
    while (!leaving_.load()) {
      if (!step()) nap(Clock::now());
    }
    spread_failure();
    farewell();
  } catch (const std::exception& e) {
    {
      const std::scoped_lock lock(mutex_);
      broken_ = e.what();
    }
    changed_.notify_all();
    const RailFailure failure{options_.rank, e.what()};
    if (watch_.failed) watch_.failed(failure);
    say_last(failure);
    // Nobody is to wait for an answer of this rail.
    for (FabricConnection& connection : connections_) connection.end();
  }
}

/// Tells other hosts why the rail has broken; they would else only see it end. Nothing that has
/// come in takes effect any more.
void FabricRail::say_last(const RailFailure& failure) noexcept try {
  tell_all(failure);
  const Deadline limit = Deadline::in(kLastWords);
  while (!is_done() && !limit.expired()) {
    const Clock::time_point now = Clock::now();
    bool any = take_completions();
    for (FabricConnection& connection : connections_) any = connection.post(now) || any;
    if (!any) nap(now);
  }
} catch (const std::exception&) {
}

/// Others may need what this rank still has to send: it goes when they have heard it all or ended,
/// or nothing goes on for as long as the ranks of a group wait for one another.
void FabricRail::farewell() {
  step();
  for (FabricConnection& connection : connections_) {
    if (connection.state() == State::kConnected) {
      connection.send(MessageKind::kBye, {}, Clock::now());
    }
  }
  const auto waits_for_port = [&](Clock::time_point now) {
    return std::ranges::any_of(connections_, [&](const FabricConnection& connection) {
      const auto due = connection.next_due();
      return due && *due > now;
    });
  };
  const auto patience = [&] { return Deadline::in(failure_spread_ ? kFarewell : limit_); };
  Deadline limit = patience();
  while (!is_done() && !limit.expired()) {
    const bool had_failed = failure_spread_;
    const bool any = step();
    const Clock::time_point now = Clock::now();
    const bool goes_on = !failure_spread_ && (any || waits_for_port(now));
    if (goes_on || failure_spread_ != had_failed) limit = patience();
    if (!any) nap(now);
  }
}

/// Whether anything went on.
bool FabricRail::step() {
  bool any = take_posts();
  any = take_events() || any;
  any = take_completions() || any;
  const Clock::time_point now = Clock::now();
  for (FabricConnection& connection : connections_) any = connection.post(now) || any;
  any = deliver(now) || any;
  if (now >= next_look_) {
    spread_failure();
    next_look_ = now + kLongestNap;
  }
  return any;
}

/// Ranks of later hosts connect to those of earlier ones.
void FabricRail::begin_connecting() {
  const Introduction own{.rank = options_.rank, .group = options_.group};
  for (int host = 0; host < own_host(); ++host) {
    const std::string& address = addresses_[static_cast<std::size_t>(rank_of(host))];
    const std::size_t colon = address.rfind(':');
    const Info info =
        find(address.substr(0, colon).c_str(), address.substr(colon + 1).c_str(), FI_NUMERICHOST);
    to(host).connect(*domain_, *events_, *completions_, *info, own);
  }
}

bool FabricRail::take_posts() {
  std::vector<Post> posts;
  {
    const std::scoped_lock lock(mutex_);
    posts.swap(posts_);
  }
  for (Post& post : posts) {
    const Clock::time_point due = out_.send(post.body.size(), Clock::now());
    to(post.host).send(post.kind, std::move(post.body), due);
  }
  return !posts.empty();
}

FabricConnection* FabricRail::find(const fid* endpoint) {
  for (FabricConnection& connection : connections_) {
    if (endpoint != nullptr && connection.endpoint() == endpoint) return &connection;
  }
  return nullptr;
}

bool FabricRail::take_events() {
  bool any = false;
  for (;;) {
    std::uint32_t kind = 0;
    alignas(fi_eq_cm_entry) std::byte buffer[sizeof(fi_eq_cm_entry) + sizeof(Introduction)];
    const ssize_t n = fi_eq_read(events_.get(), &kind, buffer, sizeof(buffer), 0);
    if (n == -FI_EAGAIN) return any;
    any = true;
    if (n == -FI_EAVAIL) {
      take_error();
      continue;
    }
    FabricLibrary::get().check(n, "fi_eq_read");
    take_event(kind, *reinterpret_cast<fi_eq_cm_entry*>(buffer), static_cast<std::size_t>(n));
  }
}

void FabricRail::take_event(std::uint32_t kind, fi_eq_cm_entry& entry, std::size_t bytes) {
  if (kind == FI_CONNREQ) {
    const Info info(entry.info);
    return answer_request(*info, entry.data, bytes - sizeof(entry));
  }
  FabricConnection* const connection = find(entry.fid);
  if (connection == nullptr) return;  // it has ended
  if (kind == FI_SHUTDOWN) {
    take_completions();  // what came before
    return lose(host_of(*connection));
  }
  if (kind != FI_CONNECTED) return;
  connection->begin();
  {
    const std::scoped_lock lock(mutex_);
    has_connected_[static_cast<std::size_t>(host_of(*connection))] = true;
  }
  changed_.notify_all();
}

void FabricRail::answer_request(fi_info& info, const void* data, std::size_t bytes) {
  Introduction other;
  if (bytes >= sizeof(other)) std::memcpy(&other, data, sizeof(other));
  const bool is_known = other.magic == MessageHeader::kMagic && other.group == options_.group &&
                        other.rank >= 0 && other.rank < options_.layout.ranks() &&
                        options_.layout.local_of(other.rank) == local();
  const int host = is_known ? options_.layout.host_of(other.rank) : own_host();
  if (host <= own_host() || to(host).state() != State::kNone) {
    fi_reject(listener_.get(), info.handle, nullptr, 0);
    return;
  }
  to(host).accept(*domain_, *events_, *completions_, info);
}

void FabricRail::take_error() {
  fi_eq_err_entry error{};
  if (fi_eq_readerr(events_.get(), &error, 0) < 0) return;
  FabricConnection* const connection = find(error.fid);
  if (connection == nullptr) return;
  require(connection->state() != State::kConnecting, ErrorCode::kDevice, "rank ",
          rank_of(host_of(*connection)),
          " cannot be connected to: ", FabricLibrary::get().strerror(error.err));
  lose(host_of(*connection));
}

bool FabricRail::take_completions() {
  bool any = false;
  for (;;) {
    fi_cq_entry entry{};
    const ssize_t n = fi_cq_read(completions_.get(), &entry, 1);
    if (n == -FI_EAGAIN) return any;
    any = true;
    if (n == -FI_EAVAIL) {
      fi_cq_err_entry error{};
      if (fi_cq_readerr(completions_.get(), &error, 0) < 0 || error.op_context == nullptr) continue;
      const auto& operation = *static_cast<FabricConnection::Operation*>(error.op_context);
      lose(host_of(*operation.connection));
      continue;
    }
    FabricLibrary::get().check(n, "fi_cq_read");
    const auto& operation = *static_cast<FabricConnection::Operation*>(entry.op_context);
    FabricConnection& connection = *operation.connection;
    if (connection.state() != State::kConnected) continue;
    if (!operation.is_receive) {
      connection.sent();
    } else if (auto message = connection.received()) {
      take_message(host_of(connection), std::move(*message));
    }
  }
}

void FabricRail::take_message(int host, FabricConnection::Message message) {
  switch (message.kind) {
    case MessageKind::kBlock: {
      const Clock::time_point due = in_.receive(message.body.size(), Clock::now());
      deliveries_.push_back({.due = due, .body = std::move(message.body)});
      return;
    }
    case MessageKind::kFailure:
      if (watch_.failed) watch_.failed(unpack_failure(message.body));
      return;
    case MessageKind::kBye:
      has_left_[static_cast<std::size_t>(host)] = true;
      deliveries_.push_back({.due = Clock::now(), .body = {}, .ended_host = host});
      return;
    case MessageKind::kHeard:
      return;  // the connection's concern
  }
}

bool FabricRail::deliver(Clock::time_point now) {
  bool any = false;
  while (!deliveries_.empty() && deliveries_.front().due <= now) {
    const Delivery delivery = std::move(deliveries_.front());
    deliveries_.pop_front();
    if (delivery.ended_host < 0) {
      take_block(delivery.body);
    } else if (watch_.ended) {
      watch_.ended(rank_of(delivery.ended_host), delivery.lost);
    }
    any = true;
  }
  return any;
}

void FabricRail::take_block(const Bytes& body) {
  RailMemory memory;
  {
    const std::scoped_lock lock(mutex_);
    const auto number = memory_of(body);
    const auto found = number ? memories_.find(*number) : memories_.end();
    if (found != memories_.end()) memory = found->second;
  }
  if (!memory.ranks.empty()) deliver_block(body, memory, local());
}

void FabricRail::lose(int host) {
  FabricConnection& connection = to(host);
  if (connection.state() == State::kEnded) return;
  connection.end();
  if (has_left_[static_cast<std::size_t>(host)]) return;
  deliveries_.push_back({.due = Clock::now(), .body = {}, .ended_host = host, .lost = true});
}

void FabricRail::spread_failure() {
  if (failure_spread_ || !watch_.failure) return;
  const auto failure = watch_.failure();
  if (!failure) return;
  failure_spread_ = true;
  tell_all(*failure);
}

void FabricRail::tell_all(const RailFailure& failure) {
  for (int host = 0; host < options_.layout.hosts; ++host) {
    if (host == own_host()) continue;
    to(host).send(MessageKind::kFailure, pack_failure(failure), Clock::now());
  }
}

/// Until something may go on.
void FabricRail::nap(Clock::time_point now) {
  Clock::time_point until = now + kLongestNap;
  for (const FabricConnection& connection : connections_) {
    if (const auto due = connection.next_due(); due && *due > now) until = std::min(until, *due);
  }
  if (!deliveries_.empty()) until = std::min(until, deliveries_.front().due);
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - now).count();

  fid* waited[] = {&events_->fid, &completions_->fid};
  if (fi_trywait(fabric_.get(), waited, 2) != FI_SUCCESS) return;
  pollfd polled[3] = {};
  polled[0] = {.fd = wake_.get(), .events = POLLIN, .revents = 0};
  for (int i = 0; i < 2; ++i) {
    FabricLibrary::get().check(fi_control(waited[i], FI_GETWAIT, &polled[i + 1].fd), "fi_control");
    polled[i + 1].events = POLLIN;
  }
  const timespec time{.tv_sec = 0, .tv_nsec = std::max<std::int64_t>(left, 0)};
  ppoll(polled, 3, &time, nullptr);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = read(wake_.get(), &count, sizeof(count));
}

}  // namespace
}  // namespace rail

std::unique_ptr<Rail> make_rail(const RailOptions& options) {
  return std::make_unique<rail::FabricRail>(options);
}

}  // namespace uniep
