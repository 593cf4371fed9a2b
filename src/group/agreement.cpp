#include "group/agreement.h"

#include <optional>

#include "base/check.h"
#include "base/error_of.h"

namespace uniep {
namespace {

// What a rank sends: 'E', its error code, the sentence; or 'C', the call, NUL, the payload.

std::string refusal_message(const Error& error) {
  return std::string("E") + static_cast<char>(error.code()) + error.what();
}

std::optional<std::string> refusal(const std::function<void()>& check) {
  try {
    check();
    return std::nullopt;
  } catch (...) {
    return refusal_message(current_error());
  }
}

std::string call_of(const std::string& message) {
  return message.substr(1, message.find('\0') - 1);
}

}  // namespace

std::vector<std::string> agree(Bootstrap& bootstrap, int limit_ms, Stage stage,
                               const std::string& call, const std::function<void()>& check,
                               const std::string& payload) {
  const std::optional<std::string> refused = refusal(check);
  const std::string own = refused ? *refused : "C" + call + '\0' + payload;
  std::vector<std::string> all = bootstrap.all_gather(own, name(stage), limit_ms);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r][0] == 'E') {
      throw Error(static_cast<ErrorCode>(all[r][1]), cat("rank ", r, ": ", all[r].substr(2)));
    }
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    require(call_of(all[r]) == call_of(all[0]), ErrorCode::kInvalidArgument,
            "ranks disagree: rank 0 calls ", call_of(all[0]), "; rank ", r, " calls ",
            call_of(all[r]), "; the same call on every rank is accepted");
  }
  for (std::string& message : all) message.erase(0, message.find('\0') + 1);
  return all;
}

}  // namespace uniep
