#pragma once

#include <cctype>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "trace/utf8.h"

namespace uniep::trace {

struct XmlElement {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;  ///< its own, without that of its children
  std::vector<XmlElement> children;
};

/// Reads XML 1.0 as far as pictures need it, that is without a document type, comments and
/// namespaces' prefixes; throws std::runtime_error where the text is not well-formed.
class XmlReader {
 public:
  static XmlElement read(std::string_view text) {
    XmlReader reader(text);
    reader.require_characters();
    reader.skip_declaration();
    reader.skip_spaces();
    reader.expect("<");
    XmlElement root = reader.element();
    reader.skip_spaces();
    reader.require(reader.at_ == text.size(), "something behind the root");
    return root;
  }

 private:
  explicit XmlReader(std::string_view text) : text_(text) {}

  void require(bool ok, const std::string& what) const {
    if (!ok)
      throw std::runtime_error("not well-formed at byte " + std::to_string(at_) + ": " + what);
  }

  /// UTF-8, and nothing that XML 1.0 forbids.
  void require_characters() const {
    require(to_utf8(text_) == text_, "not UTF-8");
    for (const char c : text_) {
      const auto byte = static_cast<unsigned char>(c);
      require(byte >= 0x20 || c == '\n' || c == '\t' || c == '\r', "a control character");
    }
  }

  bool next_is(std::string_view word) const { return text_.substr(at_).starts_with(word); }
  char here() const {
    require(at_ < text_.size(), "the text ends");
    return text_[at_];
  }
  void expect(std::string_view word) {
    require(next_is(word), "no " + std::string(word));
    at_ += word.size();
  }
  void skip_spaces() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  void skip_declaration() {
    if (!next_is("<?xml ")) return;
    const std::size_t end = text_.find("?>", at_);
    require(end != std::string_view::npos, "the declaration has no end");
    at_ = end + 2;
  }

  std::string name() {
    const std::size_t begin = at_;
    require(std::isalpha(static_cast<unsigned char>(here())), "no name");
    while (std::isalnum(static_cast<unsigned char>(here())) || here() == '-') ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  char entity() {
    static const std::map<std::string_view, char> kEntities = {
        {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
    expect("&");
    const auto found = kEntities.find(text_.substr(at_, text_.find(';', at_) - at_));
    require(found != kEntities.end(), "an unknown entity");
    at_ += found->first.size() + 1;
    return found->second;
  }

  /// Up to one of the letters in `ends`.
  std::string characters(std::string_view ends) {
    std::string s;
    while (ends.find(here()) == std::string_view::npos) {
      require(here() != '<', "a bare <");
      require(!next_is("]]>"), "a bare ]]>");
      if (here() == '&') {
        s += entity();
      } else {
        s += text_[at_++];
      }
    }
    return s;
  }

  /// From behind its "<".
  XmlElement element() {
    XmlElement e;
    e.name = name();
    for (;;) {
      const std::size_t before = at_;
      skip_spaces();
      if (next_is("/>")) {
        at_ += 2;
        return e;
      }
      if (next_is(">")) break;
      require(at_ > before, "no space before an attribute");
      attribute(e);
    }
    expect(">");
    for (;;) {
      e.text += characters("<");
      expect("<");
      if (next_is("/")) break;
      e.children.push_back(element());
    }
    expect("/" + e.name);
    skip_spaces();
    expect(">");
    return e;
  }

  void attribute(XmlElement& e) {
    const std::string key = name();
    expect("=\"");
    require(e.attributes.emplace(key, characters("\"")).second, "attribute " + key + " twice");
    expect("\"");
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace uniep::trace
