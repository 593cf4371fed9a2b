#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

namespace uniep::trace {

/// Three numbers: sRGB without its transfer function (0 to 1), or CIE Lab.
using Triple = std::array<double, 3>;
using Matrix = std::array<Triple, 3>;

inline Triple times(const Matrix& m, const Triple& v) {
  Triple product{};
  for (std::size_t i = 0; i < 3; ++i) product[i] = m[i][0] * v[0] + m[i][1] * v[1] + m[i][2] * v[2];
  return product;
}

/// "#rrggbb" as linear light: IEC 61966-2-1 (sRGB).
inline Triple linear(std::string_view color) {
  const auto digit = [&](std::size_t i) {
    return static_cast<double>(std::string_view("0123456789abcdef").find(color[i]));
  };
  Triple light{};
  for (std::size_t i = 0; i < 3; ++i) {
    const double s = (16 * digit(1 + 2 * i) + digit(2 + 2 * i)) / 255;
    light[i] = s <= 0.04045 ? s / 12.92 : std::pow((s + 0.055) / 1.055, 2.4);
  }
  return light;
}

/// Linear sRGB to CIE XYZ for D65: IEC 61966-2-1.
inline constexpr Matrix kXyz = {{{0.4124564, 0.3575761, 0.1804375},
                                 {0.2126729, 0.7151522, 0.0721750},
                                 {0.0193339, 0.1191920, 0.9503041}}};

/// CIE 15:2004, 8.2.1, with white as the sum of the primaries.
inline Triple lab(const Triple& light) {
  const Triple xyz = times(kXyz, light), white = times(kXyz, {1, 1, 1});
  Triple f{};
  for (std::size_t i = 0; i < 3; ++i) {
    const double t = xyz[i] / white[i];
    f[i] = t > 216.0 / 24389 ? std::cbrt(t) : (24389.0 / 27 * t + 16) / 116;
  }
  return {116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])};
}

/// CIE 1976: the distance in Lab. About 2.3 is just noticeable (Mahy et al. 1994).
inline double distance(const Triple& a, const Triple& b) {
  const Triple p = lab(a), q = lab(b);
  return std::hypot(p[0] - q[0], p[1] - q[1], p[2] - q[2]);
}

/// Ways to see a colour. Those that lack a kind of cone: Machado, Oliveira and Fernandes, "A
/// Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE TVCG 15(6), 2009,
/// the matrices for severity 1, which apply to linear light. Grey: the luminance alone, as print
/// shows it.
struct Eye {
  const char* name;
  Matrix matrix;
};
inline constexpr double kRed = kXyz[1][0], kGreen = kXyz[1][1], kBlue = kXyz[1][2];
inline constexpr Eye kEyes[] = {
    {"all cones", {{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}}},
    {"protanopia",
     {{{0.152286, 1.052583, -0.204868},
       {0.114503, 0.786281, 0.099216},
       {-0.003882, -0.048116, 1.051998}}}},
    {"deuteranopia",
     {{{0.367322, 0.860646, -0.227968},
       {0.280085, 0.672501, 0.047413},
       {-0.011820, 0.042940, 0.968881}}}},
    {"tritanopia",
     {{{1.255528, -0.076749, -0.178779},
       {-0.078411, 0.930809, 0.147602},
       {0.004733, 0.691367, 0.303900}}}},
    {"grey", {{{kRed, kGreen, kBlue}, {kRed, kGreen, kBlue}, {kRed, kGreen, kBlue}}}}};

inline Triple seen(const Eye& eye, std::string_view color) {
  Triple light = times(eye.matrix, linear(color));
  for (double& c : light) c = std::clamp(c, 0.0, 1.0);
  return light;
}

/// WCAG 2.1, "contrast ratio": 1 to 21; 4.5 is what its level AA asks of text. (Its luminance has
/// the same weights, rounded.)
inline double contrast(std::string_view a, std::string_view b) {
  const double x = times(kXyz, linear(a))[1], y = times(kXyz, linear(b))[1];
  return (std::max(x, y) + 0.05) / (std::min(x, y) + 0.05);
}

}  // namespace uniep::trace
