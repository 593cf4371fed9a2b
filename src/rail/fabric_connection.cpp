#include "rail/fabric_connection.h"

#include <utility>

#include "base/check.h"
#include "rail/connection_sockets.h"

namespace uniep::rail {
namespace {

constexpr std::size_t kMostPosted = 32;  // sends at a time

}  // namespace

void FabricConnection::open(fid_domain& domain, fid_eq& events, fid_cq& completions,
                            fi_info& info) {
  const FabricLibrary& fabric = FabricLibrary::get();
  fid_ep* endpoint = nullptr;
  fabric.check(fi_endpoint(&domain, &info, &endpoint, this), "fi_endpoint");
  endpoint_.reset(endpoint);
  fabric.check(fi_ep_bind(endpoint, &events.fid, 0), "fi_ep_bind");
  fabric.check(fi_ep_bind(endpoint, &completions.fid, FI_SEND | FI_RECV), "fi_ep_bind");
  fabric.check(fi_enable(endpoint), "fi_enable");
  state_ = State::kConnecting;
}

void FabricConnection::connect(fid_domain& domain, fid_eq& events, fid_cq& completions,
                               fi_info& info, const Introduction& own) {
  open(domain, events, completions, info);
  FabricLibrary::get().check(fi_connect(endpoint_.get(), info.dest_addr, &own, sizeof(own)),
                             "fi_connect");
}

void FabricConnection::accept(fid_domain& domain, fid_eq& events, fid_cq& completions,
                              fi_info& info) {
  open(domain, events, completions, info);
  FabricLibrary::get().check(fi_accept(endpoint_.get(), nullptr, 0), "fi_accept");
}

void FabricConnection::begin() {
  state_ = State::kConnected;
  sockets_ = KeptFromChildren(sockets_of(*endpoint_));
  receive(&header_, sizeof(header_));
}

void FabricConnection::end() {
  if (state_ == State::kEnded) return;
  state_ = State::kEnded;
  sockets_ = {};
  endpoint_.reset();
  outgoing_.clear();
  posted_ = 0;
}

void FabricConnection::receive(void* to, std::size_t bytes) {
  FabricLibrary::get().check(fi_recv(endpoint_.get(), to, bytes, nullptr, 0, &receive_), "fi_recv");
}

void FabricConnection::send(MessageKind kind, Bytes body, Clock::time_point due) {
  if (state_ == State::kEnded) return;
  if (is_answered(kind)) ++unanswered_;
  outgoing_.push_back({pack_header(kind, body.size()), due});
  if (!body.empty()) outgoing_.push_back({std::move(body), due});
}

bool FabricConnection::post(Clock::time_point now) {
  bool any = false;
  while (state_ == State::kConnected && posted_ < outgoing_.size() && posted_ < kMostPosted) {
    const Outgoing& next = outgoing_[posted_];
    if (next.due > now) break;
    const long result =
        fi_send(endpoint_.get(), next.bytes.data(), next.bytes.size(), nullptr, 0, &send_);
    if (result == -FI_EAGAIN) break;
    FabricLibrary::get().check(result, "fi_send");
    ++posted_;
    any = true;
  }
  return any;
}

std::optional<FabricConnection::Clock::time_point> FabricConnection::next_due() const {
  if (posted_ == outgoing_.size()) return std::nullopt;
  return outgoing_[posted_].due;
}

void FabricConnection::sent() {
  if (posted_ == 0) return;  // of an endpoint that has ended
  outgoing_.pop_front();
  --posted_;
}

std::optional<FabricConnection::Message> FabricConnection::received() {
  if (in_body_) return take_message();
  require(header_.magic == MessageHeader::kMagic, ErrorCode::kIo,
          "a message between hosts does not begin as one of uniep does");
  if (header_.body_bytes == 0) return take_message();
  in_body_ = true;
  body_.resize(header_.body_bytes);
  receive(body_.data(), body_.size());
  return std::nullopt;
}

std::optional<FabricConnection::Message> FabricConnection::take_message() {
  Message message{header_.kind, std::exchange(body_, {})};
  in_body_ = false;
  receive(&header_, sizeof(header_));
  if (is_answered(message.kind)) send(MessageKind::kHeard, {}, Clock::now());
  if (message.kind != MessageKind::kHeard) return message;
  --unanswered_;
  return std::nullopt;
}

}  // namespace uniep::rail
