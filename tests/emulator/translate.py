#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes C++ of CUDA: translate.py <src> <out> [file ...] copies src/cuda, src/registry.cc and the files to
<out>, with

- every asm statement replaced by a call of emulator::ptx (include/emulator/ptx.h), with the operands of the
  statement as arguments, outputs first. PTX lists the texts that are known. The call for any other text
  reports it when a kernel executes it.
- the products of ptx/wgmma.cuh, whose asm statements are macros, replaced by an include of
  include/emulator/wgmma.h.
- every __shared__ variable replaced by a reference to the shared memory of the emulated CTA.

Lines keep their numbers, and #line keeps their names, so messages point to the sources."""

from __future__ import annotations

import re
import sys
from pathlib import Path

R = r"\{%\d+(?:, %\d+)*\}"  # a list of registers
S = r"(?:\.shared(?:::cta)?)?"
MMA = r"mma\.sync\.aligned"
IF = r"\{ \.reg \.pred p; setp\.ne\.[bu]32 p, "
G = r"ld\.global(?:\.nc)?"
LD, ST = r"ld(?:\.volatile)?\.shared", r"st(?:\.volatile)?\.shared"
MB, BULK, COUNTED = r"mbarrier\.", r"cp\.async\.bulk", r"mbarrier::complete_tx::bytes"
THERE = r"\{ \.reg \.b32 there; mapa\.shared::cluster\.u32 there,"
TO = r"\{ \.reg \.b32 to, there; mapa\.shared::cluster\.u32 to,"
# Patterns of whole statements, and the functions of emulator::ptx; \1, \2 are groups of the pattern.
PTX = [
    (r"", None),
    (rf"{MMA}\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32 {R}, {R}, {R}, {R};", r"mma_m16n8k16_\1"),
    (
        rf"{MMA}\.m16n8k8\.row\.col\.f32\.(bf16|f16|tf32)\.\1\.f32 {R}, {R}, (?:{R}|%\d+), {R};",
        r"mma_m16n8k8_\1",
    ),
    (rf"ldmatrix\.sync\.aligned\.m8n8\.x([124]){S}\.b16 {R}, \[%\d\];", r"ldmatrix<\1, false>"),
    (rf"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.trans{S}\.b16 {R}, \[%\d\];", r"ldmatrix<\1, true>"),
    (rf"stmatrix\.sync\.aligned\.m8n8\.x([124]){S}\.b16 \[%0\], {R};", r"stmatrix<\1, false>"),
    (rf"stmatrix\.sync\.aligned\.m8n8\.x([124])\.trans{S}\.b16 \[%0\], {R};", r"stmatrix<\1, true>"),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16 %0, %1;", "movmatrix"),
    (rf"{LD}\.[bfu]32 %0, \[%1\];", "load_shared"),
    (rf"{LD}\.v[24]\.[bfu]32 {R}, \[%\d\];", "load_shared"),
    (rf"{ST}\.[bfu]32 \[%0\], %1;", "store_shared"),
    (rf"{ST}\.v[24]\.[bfu]32 \[%0\], {R};", "store_shared"),
    (rf"{IF}%0, 0; @p {ST}(?:\.v2)?\.[bf]32 \[%1\], (?:%2|{R}); \}}", "store_shared_if"),
    (r"prefetch\.global\.L2 \[%0\];", "nothing"),
    (r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (4|8|16)(?:, %2)?;", r"copy_async<\1>"),
    (r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], %2, %3;", "copy_async_of"),
    (r"cp\.async\.commit_group;", "commit_group"),
    (r"cp\.async\.wait_group %0;", "wait_group"),
    (r"cp\.async\.wait_all;", "wait_all"),
    (r"cvt\.rn\.bf16x2\.f32 %0, %1, %2;", "cvt_bf16x2"),
    (r"cvt\.rn\.f16x2\.f32 %0, %1, %2;", "cvt_f16x2"),
    (r"cvt\.rna\.tf32\.f32 %0, %1;", "cvt_rna_tf32"),
    (
        r"\{ \.reg \.b32 most; min\.NaN\.f16x2 most, %0, %1; max\.NaN\.f16x2 %0, most, %2; \}",
        "clamp_f16x2",
    ),
    (r"ex2\.approx(?:\.ftz)?\.f32 %0, %1;", "ex2"),
    (r"lg2\.approx(?:\.ftz)?\.f32 %0, %1;", "lg2"),
    (r"rcp\.approx(?:\.ftz)?\.f32 %0, %1;", "rcp"),
    (r"rsqrt\.approx(?:\.ftz)?\.f32 %0, %1;", "rsqrt"),
    (r"tanh\.approx\.f32 %0, %1;", "tanh"),
    (r"min\.NaN\.f32 %0, %1, %2;", "min_nan"),
    (r"max\.NaN\.f32 %0, %1, %2;", "max_nan"),
    (r"mad\.wide\.s32 %0, %1, %2, %3;", "mad_wide"),
    (rf"{IF}%2, 0; mov\.b32 %0, 0; @p {G}\.u8 %0, \[%1\]; \}}", "load_global_if<unsigned char>"),
    (rf"{IF}%2, 0; mov\.b32 %0, 0; @p {G}\.u16 %0, \[%1\]; \}}", "load_global_if<unsigned short>"),
    (rf"{IF}%2, 0; mov\.b32 %0, 0; @p {G}\.b32 %0, \[%1\]; \}}", "load_global_if<unsigned>"),
    (rf"{IF}%5, 0; @p {G}\.v4\.b32 {R}, \[%4\]; \}}", "load_global_four_if"),
    (rf"{IF}%0, 0; @p st\.global(?:\.cs)?\.v[24]\.b32 \[%1\], {R}; \}}", "store_global_if"),
    (r"ld\.global\.s32 %0, \[%1\];", "load_global"),
    (r"ld\.acquire\.gpu\.global\.s32 %0, \[%1\];", "load_acquire"),
    (r"st\.release\.gpu\.global\.s32 \[%0\], %1;", "store_release"),
    (r"griddepcontrol\.\w+;", "nothing"),
    (r"mov\.u32 %0, %laneid;", "lane_id"),
    (r"mov\.u32 %0, %tid\.x;", "thread_id"),
    (r"mov\.b64 %0, \{%1, %2\};", "join"),
    (r"bar\.sync %0, %1;", "barrier_sync"),
    (r"bar\.arrive %0, %1;", "barrier_arrive"),
    (
        r"\{ \.reg \.pred in, out; setp\.ne\.u32 in, %1, 0; barrier\.cta\.red\.or\.pred out, %2, %3, in; "
        r"selp\.u32 %0, 1, 0, out; \}",
        "barrier_any",
    ),
    (r"fence\.proxy\.async\.[\w:]+;", "nothing"),
    (r"setmaxnreg\.\w+\.sync\.aligned\.u32 %0;", "nothing"),
    (r"mbarrier\.init\.shared::cta\.b64 \[%0\], %1;", "mbarrier_init"),
    (r"fence\.mbarrier_init\.release\.cluster;", "nothing"),
    (rf"{MB}arrive\.shared::cta\.b64 _, \[%0\];", "mbarrier_arrive"),
    (rf"{THERE} %0, %1; {MB}arrive\.shared::cluster\.b64 _, \[there\]; \}}", "mbarrier_arrive_at"),
    (rf"{MB}arrive\.expect_tx\.shared::cta\.b64 _, \[%0\], %1;", "mbarrier_arrive_expecting"),
    (
        rf"{THERE} %0, %2; {MB}arrive\.expect_tx\.shared::cluster\.b64 _, \[there\], %1; \}}",
        "mbarrier_arrive_expecting_at",
    ),
    (rf"{MB}expect_tx\.relaxed\.cta\.shared::cta\.b64 \[%0\], %1;", "mbarrier_expect"),
    (
        rf"{THERE} %0, %2; {MB}expect_tx\.relaxed\.cluster\.shared::cluster\.b64 \[there\], %1; \}}",
        "mbarrier_expect_at",
    ),
    (
        rf"\{{ \.reg \.pred is; {MB}test_wait\.parity\.shared::cta\.b64 is, \[%1\], %2; "
        r"selp\.u32 %0, 1, 0, is; \}",
        "mbarrier_test",
    ),
    (
        rf"\{{ \.reg \.pred done; again: {MB}try_wait\.parity\.shared::cta\.b64 done, \[%0\], %1; "
        r"@!done bra again; \}",
        "mbarrier_wait",
    ),
    (
        rf"{BULK}\.shared::cluster\.global\.{COUNTED}\.multicast::cluster "
        r"\[%0\], \[%1\], %2, \[%3\], %4;",
        "copy_bulk_to_ranks",
    ),
    (rf"{BULK}\.shared::cluster\.global\.{COUNTED} \[%0\], \[%1\], %2, \[%3\];", "copy_bulk"),
    (
        rf"{TO} %0, %4; mapa\.shared::cluster\.u32 there, %3, %4; "
        rf"{BULK}\.shared::cluster\.shared::cta\.{COUNTED} \[to\], \[%1\], %2, \[there\]; \}}",
        "copy_bulk_to",
    ),
    (
        rf"{TO} %0, %4; mapa\.shared::cluster\.u32 there, %3, %4; "
        rf"st\.async\.shared::cluster\.{COUNTED}\.v2\.f32 \[to\], {R}, \[there\]; \}}",
        "send_to",
    ),
    (r"mov\.u32 %0, %cluster_ctarank;", "cluster_rank"),
    (
        r"barrier\.cluster\.arrive\.release\.aligned; barrier\.cluster\.wait\.acquire\.aligned;",
        "sync_cluster",
    ),
    (
        rf"{BULK}\.tensor\.([45])d\.shared::cluster\.global\.tile\.{COUNTED} "
        rf"\[%0\], \[%1, {R}\], \[%\d\];",
        r"load_tile_\1d",
    ),
    (rf"{BULK}\.prefetch\.L2\.global \[%0\], %1;", "nothing"),
    (rf"{BULK}\.prefetch\.tensor\.4d\.L2\.global\.tile \[%0, {R}\];", "nothing"),
    (
        rf"{BULK}\.tensor\.([45])d\.global\.shared::cta\.tile\.bulk_group \[%0, {R}\], \[%\d\];",
        r"store_tile_\1d",
    ),
    (rf"{BULK}\.global\.shared::cta\.bulk_group \[%0\], \[%1\], %2;", "store_bulk"),
    (rf"{BULK}\.commit_group;", "commit_stores"),
    (rf"{BULK}\.wait_group\.read (?:0|%0);", "wait_stores_read"),
    (rf"{BULK}\.commit_group; {BULK}\.wait_group\.read 0;", "commit_and_wait_stores_read"),
    (rf"{BULK}\.commit_group; {BULK}\.wait_group 0;", "commit_and_wait_stores"),
    (r"prefetch\.tensormap \[%0\];", "nothing"),
    (r"wgmma\.fence\.sync\.aligned;", "fence_products"),
    (r"wgmma\.commit_group\.sync\.aligned;", "commit_products"),
    (r"wgmma\.wait_group\.sync\.aligned %0;", "wait_products"),
    (r"cvt\.rn\.satfinite\.e4m3x2\.f32 %0, %1, %2;", "cvt_e4m3x2"),
    (r"cvt\.rn\.f16x2\.e4m3x2 %0, %1;", "cvt_f16x2_e4m3x2"),
]
PRODUCTS = re.compile(r"#define CULA_TILE\(i\).*#undef CULA_TILE\n", re.S)


class Reader:
    """Walks over C++ text, past strings and comments."""

    def __init__(self, text: str, at: int):
        self.text, self.at = text, at

    def string(self) -> str:
        end = self.at + 1
        while self.text[end] != '"':
            end += 2 if self.text[end] == "\\" else 1
        found, self.at = self.text[self.at + 1 : end], end + 1
        return found

    def space(self) -> None:
        match = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.S).match(self.text, self.at)
        assert match
        self.at = match.end()

    def parens(self) -> str:
        """The inside of the parentheses that begin here."""
        start, depth = self.at + 1, 0
        while True:
            char = self.text[self.at]
            if char == '"':
                self.string()
                continue
            depth += (char == "(") - (char == ")")
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - 1]


def call_of(ptx: str, operands: list[str]) -> str:
    ptx = re.sub(r"\s+", " ", ptx.replace("\\n", " ").replace("\\t", " ").replace("%%", "%")).strip()
    ptx = re.sub(r" ?, ?", ", ", ptx)
    for pattern, function in PTX:
        if match := re.fullmatch(pattern, ptx):
            if function is None:
                return "static_cast<void>(0);"
            return f"::emulator::ptx::{match.expand(function)}({', '.join(operands)});"
    return f'::emulator::unknown_asm("{ptx}");'


def replace_asm(text: str) -> str:
    done, out = 0, []
    for match in re.finditer(r"(?<![\w\"])asm\b\s*(?:volatile)?\s*(?=\()", text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if match.start() < done or "//" in before:
            continue
        reader = Reader(text, match.end())
        inner = Reader(reader.parens() + " ", 0)
        ptx, operands, part = "", [], 0
        while True:
            inner.space()
            if inner.at >= len(inner.text):
                break
            char = inner.text[inner.at]
            if char == ":":
                part, inner.at = part + 1, inner.at + 1
            elif char == ",":
                inner.at += 1
            elif char == '"':
                constraint = inner.string()
                if part == 0:
                    ptx += constraint
                elif part < 3:
                    inner.space()
                    operands.append(" ".join(inner.parens().split()))
            else:
                raise SystemExit(f"translate.py: cannot read: {text[match.start() : reader.at]}")
        reader.space()
        assert text[reader.at] == ";", text[match.start() : reader.at + 1]
        lines = text.count("\n", match.start(), reader.at)
        out += [text[done : match.start()], call_of(ptx, operands), "\n" * lines]
        done = reader.at + 1
    return "".join(out) + text[done:]


def split_at_commas(text: str) -> list[str]:
    """At those outside of brackets."""
    parts, open_brackets = [""], ""
    for char in text:
        if char in "([" or (char == "<" and "[" not in open_brackets):
            open_brackets += char
        elif char in ")]" or (char == ">" and open_brackets.endswith("<")):
            open_brackets = open_brackets[:-1]
        if char == "," and not open_brackets:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def replace_shared(text: str) -> str:
    def dynamic(match: re.Match[str]) -> str:
        align, kind, name = match.groups()
        return f"{kind}* const {name} = static_cast<{kind}*>(::emulator::dynamic_shared({align or 16}));"

    def static(match: re.Match[str]) -> str:
        declarators = split_at_commas(" ".join(re.sub(r"//[^\n]*", "", match[1]).split()))
        first = re.fullmatch(r"(.*[\w>]) (\w+(?: ?\[.*)?)", declarators[0])
        assert first, match[0]
        made = ""
        for declarator in [first[2], *declarators[1:]]:
            name, _, dims = declarator.strip().partition("[")
            dims = "[" + dims if dims else ""
            made += (
                f"typedef {first[1]} {name}_shared_type{dims}; static const char {name}_shared_key = 0; "
                f"auto& {name} = ::emulator::static_shared<{name}_shared_type>(&{name}_shared_key); "
            )
        return made + "\n" * match[0].count("\n")

    align = r"(?:(?:__align__|alignas)\((\w+)\)\s*)?"
    text = re.sub(rf"extern\s+__shared__\s+{align}([\w:\s]+?)\s+(\w+)\s*\[\];", dynamic, text)
    align = align.replace("(\\w+)", "\\w+")
    return re.sub(rf"{align}__shared__\s+{align}([^;]*);", static, text)


def translate(path: Path, to: Path) -> None:
    text = path.read_text()
    text = PRODUCTS.sub(lambda found: '#include "emulator/wgmma.h"' + "\n" * found[0].count("\n"), text)
    text = replace_shared(replace_asm(text))
    text = re.sub(r"\b__noinline__\b", "[[gnu::noinline]]", text)
    text = f'#line 1 "{path}"\n{text}'
    to.parent.mkdir(parents=True, exist_ok=True)
    if not to.exists() or to.read_text() != text:
        to.write_text(text)


def main() -> None:
    src, out = Path(sys.argv[1]), Path(sys.argv[2])
    for path in [src / "registry.cc", *sorted((src / "cuda").rglob("*"))]:
        if path.suffix in (".h", ".cc", ".cuh"):
            translate(path, out / path.relative_to(src))
    for path in map(Path, sys.argv[3:]):
        translate(path, out / path.name)


if __name__ == "__main__":
    main()
