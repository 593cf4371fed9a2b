#!/usr/bin/env python3
"""Draws layer.svg, the picture of README.md: two ranks, four tokens each, four experts, top-2.

python docs/images/draw_layer.py > docs/images/layer.svg
"""

from __future__ import annotations

ROUTING = {  # the two experts of each token; tokens a to d are rank 0's, e to h rank 1's
    "a": (0, 2), "b": (0, 1), "c": (1, 3), "d": (2, 3),
    "e": (0, 3), "f": (1, 2), "g": (2, 3), "h": (0, 1),
}  # fmt: skip
FILL = ("#cfe3f7", "#fbe0c3")
LINE = ("#2f6fad", "#c26a12")
TOP = (96, 324)  # of each rank's band
BAND = 210
X_TOKEN, X_PLAN, X_ROWS, X_FC1, X_FC2, X_SLOTS, X_OUT = 40, 118, 380, 470, 588, 880, 1000
CELL = 20


def source(token: str) -> int:
    return 0 if token < "e" else 1


def token_y(token: str) -> int:
    return TOP[source(token)] + 26 + 40 * ("abcdefgh".index(token) % 4)


def rows_of(expert: int) -> list[str]:
    """In canonical order: by source rank, then token."""
    return [token for token in ROUTING if expert in ROUTING[token]]


def row_y(expert: int, token: str) -> int:
    return TOP[expert // 2] + 6 + 92 * (expert % 2) + (CELL + 1) * rows_of(expert).index(token)


def text(
    x: float, y: float, words: str, size: int = 13, anchor: str = "middle", **more: str
) -> str:
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{extra}>{words}</text>'


def cell(x: float, y: float, token: str) -> str:
    rank = source(token)
    box = f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" '
    box += f'fill="{FILL[rank]}" stroke="{LINE[rank]}"/>'
    return box + text(x + CELL / 2, y + 14, token, 12)


def wire(x1: float, y1: float, x2: float, y2: float, rank: int, crosses: bool) -> str:
    """Thick and full where it leaves a rank, thin where it stays."""
    bend = (x2 - x1) * 0.5
    style = f'stroke="{LINE[rank]}" stroke-width="{1.6 if crosses else 0.7}"'
    return (
        f'<path d="M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}" fill="none" {style}/>'
    )


def box(x: float, y: float, width: float, height: float, *lines: str, dashed: bool = False) -> str:
    style = 'fill="#fff" stroke="#555"' + (' stroke-dasharray="4 3"' if dashed else "")
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" {style}/>']
    first = y + height / 2 + 5 - 8 * (len(lines) - 1)
    parts += [text(x + width / 2, first + 16 * i, line) for i, line in enumerate(lines)]
    return "".join(parts)


def bands() -> list[str]:
    parts = []
    for rank, top in enumerate(TOP):
        parts.append(
            f'<rect x="12" y="{top - 12}" width="1056" height="{BAND}" rx="8" '
            'fill="#f6f6f6" stroke="#bbb"/>'
        )
        parts.append(text(24, top + 8, f"rank {rank}", 14, "start", font_weight="bold"))
        parts.append(box(X_PLAN, top + 20, 74, 152, "router", "(yours)", dashed=True))
    return parts


def dispatch() -> list[str]:
    """A token crosses to a rank once, and forks there if two of its experts live on it."""
    parts = []
    for token, experts in ROUTING.items():
        home = source(token)
        y = token_y(token) + CELL / 2
        parts.append(cell(X_TOKEN, token_y(token), token))
        parts.append(wire(X_TOKEN + CELL, y, X_PLAN, y, home, False))
        for rank in sorted({expert // 2 for expert in experts}):
            ends = [row_y(e, token) + CELL / 2 for e in experts if e // 2 == rank]
            x_fork, y_fork = X_ROWS - 40, sum(ends) / len(ends)
            parts.append(wire(X_PLAN + 78, y, x_fork, y_fork, home, rank != home))
            parts += [wire(x_fork, y_fork, X_ROWS - 2, end, home, rank != home) for end in ends]
    return parts


def experts() -> list[str]:
    parts = []
    for expert in range(4):
        top = row_y(expert, rows_of(expert)[0])
        parts += [cell(X_ROWS, row_y(expert, token), token) for token in rows_of(expert)]
        parts.append(text(X_ROWS + CELL + 12, top + 46, f"e{expert}", 12, "start", fill="#555"))
        parts.append(box(X_FC1, top, 100, 4 * CELL + 3, "fc1", "+ SwiGLU"))
        parts.append(box(X_FC2, top, 70, 4 * CELL + 3, "fc2"))
    return parts


def combine() -> list[str]:
    parts = []
    for token, chosen in ROUTING.items():
        home, y = source(token), token_y(token)
        for k, expert in enumerate(chosen):
            begin = row_y(expert, token) + CELL / 2
            end_y = y - 6 + k * (CELL - 4) + (CELL - 4) / 2
            parts.append(wire(X_FC2 + 72, begin, X_SLOTS - 2, end_y, home, expert // 2 != home))
            slot = (
                f'<rect x="{X_SLOTS}" y="{y - 6 + k * (CELL - 4)}" width="34" height="{CELL - 4}"'
            )
            parts.append(f'{slot} fill="{FILL[home]}" stroke="{LINE[home]}"/>')
            parts.append(text(X_SLOTS + 17, y + 6 + k * (CELL - 4), f"{token}, e{expert}", 10))
        parts.append(text(X_SLOTS + 62, y + 15, "+ →", 15))
        parts.append(cell(X_OUT, y, token))
    return parts


def captions() -> list[str]:
    steps = (
        (X_TOKEN + 10, "x", "tokens"),
        (X_PLAN + 37, "plan", "who goes where"),
        (285, "dispatch", "pull, once per rank"),
        (X_ROWS + 14, "rows", "by expert"),
        (X_FC1 + 94, "experts", "matrix products"),
        (770, "combine", "push, row by row"),
        (X_SLOTS + 17, "slots", "k in order"),
        (X_OUT + 4, "out", "reduce"),
    )
    parts = []
    for x, name, note in steps:
        parts.append(text(x, 34, name, 15, font_weight="bold"))
        parts.append(text(x, 54, note, 11, fill="#555"))
    legend = (
        "Thick lines leave a GPU. By default all of it, from dispatch to reduce, is one launch. "
        "Backward goes the same way, with dy in place of x."
    )
    parts.append(text(540, 548, legend, 13))
    return parts


def main() -> None:
    print(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1080 566" font-family="sans-serif">'
    )
    print('<rect width="1080" height="566" fill="#fff"/>')
    for part in [*bands(), *captions(), *dispatch(), *experts(), *combine()]:
        print(part)
    print("</svg>")


if __name__ == "__main__":
    main()
