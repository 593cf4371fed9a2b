#pragma once

// What is declared with options need not know them: CLI11's header takes a compiler ten seconds.

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace uniep::tool {
class OptionGroup;
}  // namespace uniep::tool
