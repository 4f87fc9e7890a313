// SPDX-License-Identifier: Apache-2.0
// The products of ptx/wgmma.cuh, inside of its namespace.

template <class T, int kTiles, bool kTransposed>
void multiply(float (*d)[4], const std::uint32_t (&a)[4], Operand b, int add) {
    emulator::multiply_warpgroup({.element = emulator::kElementOf<T>,
                                  .tiles = kTiles,
                                  .d = d,
                                  .a = a,
                                  .left = 0,
                                  .right = b.whole(),
                                  .transposed_left = false,
                                  .transposed_right = kTransposed,
                                  .add = add});
}
template <class T, int kTiles, bool kTransposedA, bool kTransposedB>
void multiply_shared(float (&d)[kTiles][4], Operand a, Operand b, int add) {
    emulator::multiply_warpgroup({.element = emulator::kElementOf<T>,
                                  .tiles = kTiles,
                                  .d = d,
                                  .a = nullptr,
                                  .left = a.whole(),
                                  .right = b.whole(),
                                  .transposed_left = kTransposedA,
                                  .transposed_right = kTransposedB,
                                  .add = add});
}
inline std::uint32_t rounded_tf32(float x) {
    std::uint32_t word;
    emulator::ptx::cvt_rna_tf32(word, x);
    return word;
}
inline void multiply_tf32(float (&d)[16][4], const std::uint32_t (&a)[4], Operand b) {
    emulator::multiply_warpgroup({.element = emulator::Element::kTf32,
                                  .tiles = 16,
                                  .d = d,
                                  .a = a,
                                  .left = 0,
                                  .right = b.whole(),
                                  .transposed_left = false,
                                  .transposed_right = false,
                                  .add = 1});
}
