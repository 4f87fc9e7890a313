// SPDX-License-Identifier: Apache-2.0
// What the lanes of a warp do together: shuffles, votes, reductions, matrices and their products.
#include <string>

#include "emulator/ptx.h"

namespace emulator {

std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, int operand, int width) {
    struct Own {
        std::uint64_t bits, result;
        int from;
    };
    const int lane = static_cast<int>(threadIdx.x % 32), first = lane / width * width;
    int from = operand;
    switch (kind) {
        case Shuffle::kIndex: from = first + operand % width; break;
        case Shuffle::kUp: from = lane - operand < first ? lane : lane - operand; break;
        case Shuffle::kDown: from = lane + operand >= first + width ? lane : lane + operand; break;
        case Shuffle::kXor:
            from = lane ^ operand;
            if (from >= first + width) from = lane;
            break;
    }
    Own own{bits, 0, from};
    gather("a shuffle", mask, &own, [](Lanes lanes) {
        for (void* const lane : lanes) {
            if (!lane) continue;
            Own& to = *static_cast<Own*>(lane);
            const Own* const source = static_cast<const Own*>(lanes[to.from & 31]);
            to.result = source ? source->bits : 0xffffffffffffffffu;  // of a lane that takes no part: NaN
        }
    });
    return own.result;
}

unsigned ballot(const char* name, unsigned mask, bool is) {
    struct Own {
        bool is;
        unsigned result;
    } own{is, 0};
    gather(name, mask, &own, [](Lanes lanes) {
        unsigned all = 0;
        for (int i = 0; i < 32; ++i)
            if (lanes[i] && static_cast<const Own*>(lanes[i])->is) all |= 1u << i;
        for (void* const lane : lanes)
            if (lane) static_cast<Own*>(lane)->result = all;
    });
    return own.result;
}

std::uint64_t reduce(const char* name, unsigned mask, std::int64_t x,
                     std::int64_t (*add)(std::int64_t, std::int64_t)) {
    struct Own {
        std::int64_t x;
        std::int64_t (*add)(std::int64_t, std::int64_t);
    } own{x, add};
    gather(name, mask, &own, [](Lanes lanes) {
        const Own* first = nullptr;
        std::int64_t sum = 0;
        for (void* const lane : lanes) {
            if (!lane) continue;
            const Own& one = *static_cast<const Own*>(lane);
            sum = first ? one.add(sum, one.x) : one.x;
            first = &one;
        }
        for (void* const lane : lanes)
            if (lane) static_cast<Own*>(lane)->x = sum;
    });
    return static_cast<std::uint64_t>(own.x);
}

namespace {

float element_of(Element element, std::uint32_t word, int half) {
    const auto bits = static_cast<unsigned short>(half ? word >> 16 : word);
    switch (element) {
        case Element::kBf16: return __bfloat162float({bits});
        case Element::kF16: return __half2float({bits});
        case Element::kTf32: break;
    }
    return __uint_as_float(word & 0xffffe000u);
}

void require_all(Lanes lanes, const char* name) {
    for (void* const lane : lanes)
        if (!lane) fail(std::string(name) + " after a lane of the warp has ended");
}

struct MmaOwn {
    Element element;
    int depth;
    float* const* d;
    const std::uint32_t *a, *b;
};

void mma_of_warp(Lanes lanes) {
    require_all(lanes, "mma");
    const MmaOwn& first = *static_cast<const MmaOwn*>(lanes[0]);
    const Element element = first.element;
    const int depth = first.depth, pairs = depth / 8;
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaOwn& own = *static_cast<const MmaOwn*>(lanes[lane]);
        const int row = lane / 4, column = lane % 4;
        if (element == Element::kTf32) {
            for (int half = 0; half < 2; ++half) {
                a[row][column + 4 * half] = element_of(element, own.a[2 * half], 0);
                a[row + 8][column + 4 * half] = element_of(element, own.a[2 * half + 1], 0);
                b[column + 4 * half][row] = element_of(element, own.b[half], 0);
            }
        } else {
            for (int part = 0; part < pairs; ++part)
                for (int half = 0; half < 2; ++half) {
                    const int k = 8 * part + 2 * column + half;
                    a[row][k] = element_of(element, own.a[2 * part], half);
                    a[row + 8][k] = element_of(element, own.a[2 * part + 1], half);
                    b[k][row] = element_of(element, own.b[part], half);
                }
        }
        for (int e = 0; e < 4; ++e) d[row + 8 * (e / 2)][2 * column + e % 2] = *own.d[e];
    }
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < depth; ++k)
            for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < 32; ++lane) {
        const MmaOwn& own = *static_cast<const MmaOwn*>(lanes[lane]);
        for (int e = 0; e < 4; ++e) *own.d[e] = d[lane / 4 + 8 * (e / 2)][2 * (lane % 4) + e % 2];
    }
}

struct MatrixOwn {
    int count;
    bool transposed;
    std::uint32_t* const* m;
    const std::uint32_t* stored;
    std::uint32_t row;
};

// The place of a lane's element `half` in a matrix.
constexpr int row_of(int lane, int half, bool transposed) {
    return transposed ? 2 * (lane % 4) + half : lane / 4;
}
constexpr int column_of(int lane, int half, bool transposed) {
    return transposed ? lane / 4 : 2 * (lane % 4) + half;
}

template <bool kStores>
void move_matrices(Lanes lanes) {
    require_all(lanes, kStores ? "stmatrix" : "ldmatrix");
    for (int matrix = 0; matrix < static_cast<const MatrixOwn*>(lanes[0])->count; ++matrix) {
        unsigned short* rows[8];
        for (int i = 0; i < 8; ++i)
            rows[i] = static_cast<unsigned short*>(
                shared(static_cast<const MatrixOwn*>(lanes[8 * matrix + i])->row, 16, 16));
        for (int lane = 0; lane < 32; ++lane) {
            const MatrixOwn& own = *static_cast<const MatrixOwn*>(lanes[lane]);
            std::uint32_t word = 0;
            for (int half = 0; half < 2; ++half) {
                unsigned short& element =
                    rows[row_of(lane, half, own.transposed)][column_of(lane, half, own.transposed)];
                if (kStores)
                    element = static_cast<unsigned short>(own.stored[matrix] >> 16 * half);
                else
                    word |= std::uint32_t{element} << 16 * half;
            }
            if (!kStores) *own.m[matrix] = word;
        }
    }
}

}  // namespace

void mma(Element element, int depth, float* const (&d)[4], const std::uint32_t* a, const std::uint32_t* b) {
    MmaOwn own{element, depth, d, a, b};
    gather("mma", ~0u, &own, mma_of_warp);
}
void load_matrices(int count, bool transposed, std::uint32_t* const* m, std::uint32_t row) {
    MatrixOwn own{count, transposed, m, nullptr, row};
    gather("ldmatrix", ~0u, &own, move_matrices<false>);
}
void store_matrices(int count, bool transposed, std::uint32_t row, const std::uint32_t* m) {
    MatrixOwn own{count, transposed, nullptr, m, row};
    gather("stmatrix", ~0u, &own, move_matrices<true>);
}
void ptx::movmatrix(Word& to, Word from) {
    struct Own {
        Word word;
        Word* to;
    } own{from, &to};
    gather("movmatrix", ~0u, &own, [](Lanes lanes) {
        require_all(lanes, "movmatrix");
        unsigned short m[8][8];
        for (int lane = 0; lane < 32; ++lane)
            for (int half = 0; half < 2; ++half)
                m[lane / 4][2 * (lane % 4) + half] =
                    static_cast<unsigned short>(static_cast<const Own*>(lanes[lane])->word >> 16 * half);
        for (int lane = 0; lane < 32; ++lane)
            *static_cast<const Own*>(lanes[lane])->to =
                m[2 * (lane % 4)][lane / 4] | Word{m[2 * (lane % 4) + 1][lane / 4]} << 16;
    });
}

}  // namespace emulator
