// SPDX-License-Identifier: Apache-2.0
// What sm_90 adds: barriers in shared memory (mbarrier), bulk copies, tensor maps, products of warpgroups.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda.h"
#include "runner.h"

namespace emulator {

namespace {

Cta& cta_of(int rank) {
    auto& ctas = running().cluster().ctas;
    if (rank < 0 || static_cast<std::size_t>(rank) >= ctas.size())
        fail("asks for CTA " + std::to_string(rank) + " of a cluster of " + std::to_string(ctas.size()));
    Cta& cta = *ctas[static_cast<std::size_t>(rank)];
    if (cta.alive == 0) fail("accesses shared memory of CTA " + std::to_string(rank) + ", which has ended");
    return cta;
}

// --- mbarrier ---

// As it lies in shared memory. What init() has not written is no barrier.
struct Mbarrier {
    static constexpr std::uint64_t kMagic = 0b01;
    static constexpr int kMostArrivals = (1 << 20) - 1, kMostBytes = (1 << 20) - 1;
    std::uint64_t parity : 1, expected : 20, pending : 20, magic : 2;
    std::int64_t bytes : 21;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& mbarrier(Cta& cta, std::uint32_t at) {
    auto& barrier = *static_cast<Mbarrier*>(cta.shared(at, 8, 8));
    if (barrier.magic != Mbarrier::kMagic || barrier.expected == 0)
        fail("uses an mbarrier at " + std::to_string(at) + " that is not initialised");
    return barrier;
}
void end_phase(Cta& cta, Mbarrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.parity ^= 1, barrier.pending = barrier.expected;
    running().wake(*cta.cluster, &barrier);
}
void add_bytes(Mbarrier& barrier, int bytes) {
    const int sum = static_cast<int>(barrier.bytes) + bytes;
    if (std::abs(sum) > Mbarrier::kMostBytes) fail("an mbarrier counts more bytes than it can");
    barrier.bytes = sum;
}
void expect_bytes(Cta& cta, std::uint32_t at, int bytes) { add_bytes(mbarrier(cta, at), bytes); }
void arrive(Cta& cta, std::uint32_t at) {
    Mbarrier& barrier = mbarrier(cta, at);
    if (barrier.pending == 0) fail("arrives at an mbarrier more often than its phase counts");
    barrier.pending = barrier.pending - 1;
    end_phase(cta, barrier);
}
void complete_bytes(Cta& cta, std::uint32_t at, int bytes) {
    Mbarrier& barrier = mbarrier(cta, at);
    add_bytes(barrier, -bytes);
    end_phase(cta, barrier);
}
bool has_ended(std::uint32_t at, int parity) {
    if (parity != 0 && parity != 1) fail("waits for parity " + std::to_string(parity));
    return mbarrier(running().cta(), at).parity != static_cast<unsigned>(parity);
}

// --- bulk copies ---

void require_units(const void* global, int bytes) {
    if (bytes <= 0 || bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(global) % 16 != 0)
        fail("a bulk copy of what is not whole units of 16 bytes");
}
// Puts a copy of `bytes` to shared memory in flight: move(target), then the barrier of the same CTA counts
// them. Until then the target holds NaN.
template <class Move>
void copy_later(const Cta* from, Cta& to, std::uint32_t at, int bytes, std::uint32_t barrier, Move move) {
    const auto size = static_cast<std::size_t>(bytes);
    void* const target = to.shared(at, size, size < 16 ? size : 16);
    std::memset(target, 0xff, size);
    running().defer(from, to, [=, &to] {
        move(target);
        complete_bytes(to, barrier, bytes);
    });
}

// Calls body(unit of the tensor, address in shared memory) for the units of 16 bytes of a tile; those beyond
// the tensor are null.
template <class Body>
void each_unit(const CUtensorMap& map, const int* from, std::uint32_t shared, Body body) {
    const unsigned per_unit = 16 / map.element_bytes;
    std::uint32_t at = shared;
    unsigned i[5] = {};
    for (;;) {
        const unsigned char* p = static_cast<const unsigned char*>(map.base);
        bool in = true;
        for (unsigned d = 0; d < map.rank; ++d) {
            const std::int64_t place = std::int64_t{from[d]} + i[d];
            in = in && place >= 0 && place < static_cast<std::int64_t>(map.sizes[d]);
            p += place * static_cast<std::int64_t>(map.strides[d]);
        }
        const std::uint32_t swizzled = at ^ ((at >> 7 & 7u & map.swizzle_mask) << 4);
        body(in ? p : nullptr, swizzled);
        at += 16;
        unsigned d = 0;
        i[0] += per_unit;
        while (i[d] >= map.box[d]) {
            i[d] = 0;
            if (++d == map.rank) return;
            ++i[d];
        }
    }
}
int bytes_of(const CUtensorMap& map) {
    std::uint32_t bytes = map.element_bytes;
    for (unsigned d = 0; d < map.rank; ++d) bytes *= map.box[d];
    return static_cast<int>(bytes);
}
void require_tile(const CUtensorMap& map, int rank, int first_channel, std::uint32_t shared) {
    if (map.rank != static_cast<unsigned>(rank)) fail("copies a tile by a tensor map of another rank");
    if (shared % 128 != 0) fail("copies a tile to or from an address that is not a multiple of 128");
    const unsigned per_unit = 16 / map.element_bytes;
    if (first_channel % static_cast<int>(per_unit) != 0 || map.sizes[0] % per_unit != 0)
        fail("copies a tile whose rows are not whole units of 16 bytes, which is not emulated");
}

}  // namespace

void end_stores(Thread& thread) {
    for (BulkStore& store : thread.stores) {
        if (!store.was_read) fail("ends before its bulk stores have read shared memory");
        store.write();
    }
}

namespace {

// The stores of all but the latest `pending` groups.
std::size_t stores_before(const Thread& thread, int pending) {
    const std::size_t groups = thread.store_groups.size();
    return groups <= static_cast<std::size_t>(pending)
               ? 0
               : thread.store_groups[groups - 1 - static_cast<std::size_t>(pending)];
}
void read_stores(Thread& thread, int pending) {
    for (std::size_t i = 0; i < stores_before(thread, pending); ++i)
        if (BulkStore& store = thread.stores[i]; !store.was_read) store.read(), store.was_read = true;
}
void store_later(std::function<void()> read, std::function<void()> write) {
    running().current().stores.push_back({std::move(read), std::move(write)});
    BulkStore& store = running().current().stores.back();
    if (running().at_random(2)) store.read(), store.was_read = true;
}

}  // namespace

namespace ptx {

void mbarrier_init(Word at, int arrivals) {
    if (arrivals < 1 || arrivals > Mbarrier::kMostArrivals)
        fail("initialises an mbarrier for " + std::to_string(arrivals) + " arrivals");
    const auto count = static_cast<std::uint64_t>(arrivals) & Mbarrier::kMostArrivals;
    *static_cast<Mbarrier*>(shared(at, 8, 8)) = {
        .parity = 0, .expected = count, .pending = count, .magic = Mbarrier::kMagic, .bytes = 0};
}
void mbarrier_arrive(Word at) { arrive(running().cta(), at); }
void mbarrier_arrive_at(Word at, int rank) { arrive(cta_of(rank), at); }
void mbarrier_arrive_expecting(Word at, int bytes) {
    mbarrier_arrive_expecting_at(at, bytes, running().cta().rank);
}
void mbarrier_arrive_expecting_at(Word at, int bytes, int rank) {
    expect_bytes(cta_of(rank), at, bytes);
    arrive(cta_of(rank), at);
}
void mbarrier_expect(Word at, int bytes) { expect_bytes(running().cta(), at, bytes); }
void mbarrier_expect_at(Word at, int bytes, int rank) { expect_bytes(cta_of(rank), at, bytes); }
void mbarrier_test(Word& ended, Word at, int parity) {
    pause();
    ended = has_ended(at, parity);
}
void mbarrier_wait(Word at, int parity) {
    while (!has_ended(at, parity)) running().block_on(shared(at, 8, 8), "an mbarrier");
}

void copy_bulk_to_ranks(Word to, const void* from, int bytes, Word barrier, unsigned short ranks) {
    require_units(from, bytes);
    for (int rank = 0; rank < 16; ++rank)
        if (ranks >> rank & 1)
            copy_later(nullptr, cta_of(rank), to, bytes, barrier,
                       [=](void* target) { std::memcpy(target, from, static_cast<std::size_t>(bytes)); });
}
void copy_bulk(Word to, const void* from, int bytes, Word barrier) {
    copy_bulk_to_ranks(to, from, bytes, barrier, static_cast<unsigned short>(1 << running().cta().rank));
}
void copy_bulk_to(Word to, Word from, int bytes, Word barrier, int rank) {
    const void* const source = shared(from, static_cast<std::size_t>(bytes), 16);
    require_units(source, bytes);
    copy_later(&running().cta(), cta_of(rank), to, bytes, barrier,
               [=](void* target) { std::memcpy(target, source, static_cast<std::size_t>(bytes)); });
}
void send_to(Word to, float x, float y, Word barrier, int rank) {
    copy_later(nullptr, cta_of(rank), to, 8, barrier, [=](void* target) {
        const float both[] = {x, y};
        std::memcpy(target, both, sizeof both);
    });
}
void cluster_rank(Word& rank) { rank = static_cast<Word>(running().cta().rank); }
void sync_cluster() { running().sync_cluster(); }

void load_tile(Word to, const CUtensorMap* map, std::initializer_list<int> from, Word barrier) {
    require_tile(*map, static_cast<int>(from.size()), *from.begin(), to);
    Cta& cta = running().cta();
    copy_later(nullptr, cta, to, bytes_of(*map), barrier,
               [to, &cta, map = *map, at = std::vector<int>(from)](void*) {
                   each_unit(map, at.data(), to, [&](const unsigned char* unit, std::uint32_t shared) {
                       void* const target = cta.shared(shared, 16, 16);
                       if (unit)
                           std::memcpy(target, unit, 16);
                       else
                           std::memset(target, 0, 16);
                   });
               });
}
void store_tile(const CUtensorMap* map, std::initializer_list<int> to, Word from) {
    require_tile(*map, static_cast<int>(to.size()), *to.begin(), from);
    if (std::ranges::any_of(to, [](int place) { return place < 0; }))
        fail("stores a tile that begins before its tensor");  // an illegal instruction
    Cta& cta = running().cta();
    cta.shared(from, static_cast<std::size_t>(bytes_of(*map)), 16);
    auto units = std::make_shared<std::vector<std::array<unsigned char, 16>>>();
    const auto each = [from, map = *map, at = std::vector<int>(to)](auto body) {
        each_unit(map, at.data(), from, body);
    };
    store_later(
        [=, &cta] {
            each([&](const unsigned char*, std::uint32_t shared) {
                std::memcpy(units->emplace_back().data(), cta.shared(shared, 16, 16), 16);
            });
        },
        [=] {
            std::size_t i = 0;
            each([&](const unsigned char* unit, std::uint32_t) {
                if (unit) std::memcpy(const_cast<unsigned char*>(unit), (*units)[i].data(), 16);
                ++i;
            });
        });
}
void store_bulk(void* to, Word from, int bytes) {
    const auto size = static_cast<std::size_t>(bytes);
    const void* const source = shared(from, size, 16);
    require_units(to, bytes);
    auto copy = std::make_shared<std::vector<unsigned char>>(size);
    store_later([=] { std::memcpy(copy->data(), source, size); },
                [=] { std::memcpy(to, copy->data(), size); });
}
void commit_stores() {
    Thread& thread = running().current();
    thread.store_groups.push_back(thread.stores.size());
}
void wait_stores_read(int pending) { read_stores(running().current(), pending); }
void commit_and_wait_stores_read() {
    commit_stores();
    wait_stores_read(0);
}
void commit_and_wait_stores() {
    Thread& thread = running().current();
    commit_and_wait_stores_read();
    for (BulkStore& store : thread.stores) store.write();
    thread.stores.clear(), thread.store_groups.clear();
}

}  // namespace ptx

// --- products of warpgroups ---

namespace {

// An operand in shared memory, as its descriptor tells (PTX ISA, "Matrix-Descriptor Format").
struct Descriptor {
    std::uint32_t address, leading, stride, mode;

    explicit Descriptor(std::uint64_t bits)
        : address(static_cast<std::uint32_t>(bits & 0x3fff) << 4),
          leading(static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4),
          stride(static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4),
          mode(static_cast<std::uint32_t>(bits >> 62)) {
        if ((bits >> 49 & 7) != 0) fail("wgmma with a base offset, which is not emulated");
    }

    // Bytes of a row, in which the swizzle moves units: 16 without one, else 128, 64 or 32.
    std::uint32_t row_bytes() const { return mode == 0 ? 16 : 256u >> mode; }
    // The unit of 16 bytes at `byte` of a row: of a row along k, or of one along n if it is transposed.
    const unsigned char* unit(Cta& cta, int row, int byte, bool transposed) const {
        const auto eight = static_cast<std::uint32_t>(row / 8),
                   in_eight = static_cast<std::uint32_t>(row % 8),
                   panel = static_cast<std::uint32_t>(byte) / row_bytes(),
                   in_panel = static_cast<std::uint32_t>(byte) % row_bytes();
        std::uint32_t at = address + in_eight * row_bytes() + in_panel;
        if (mode == 0 && transposed)
            at += eight * leading + panel * stride;
        else
            at += eight * stride + panel * leading;
        if (mode != 0) at ^= (at >> 7 & (row_bytes() / 16 - 1)) << 4;
        return static_cast<const unsigned char*>(cta.shared(at, 16, 16));
    }
};

float number_at(Element element, const unsigned char* unit, int i) {
    if (element == Element::kTf32) {
        std::uint32_t word;
        std::memcpy(&word, unit + 4 * i, 4);
        return __uint_as_float(word & 0xffffe000u);
    }
    std::uint16_t half;
    std::memcpy(&half, unit + 2 * i, 2);
    return element == Element::kBf16 ? __bfloat162float({half}) : __half2float({half});
}

void multiply(Cta& cta, int warp, Products::Product& product) {
    const Element element = product.element;
    const int depth = element == Element::kTf32 ? 8 : 16, per_unit = element == Element::kTf32 ? 4 : 8,
              columns = 8 * product.sum->tiles;
    float a[16][16] = {};
    std::vector<float> b(static_cast<std::size_t>(depth * columns));
    if (product.has_left) {
        const Descriptor left(product.left);
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < depth; ++k) {
                const int m = warp % 4 * 16 + i, row = product.transposed_left ? k : m,
                          first = product.transposed_left ? m : k;
                a[i][k] =
                    number_at(element, left.unit(cta, row, first / per_unit * 16, product.transposed_left),
                              first % per_unit);
            }
    } else {
        for (int lane = 0; lane < 32; ++lane)
            for (int word = 0; word < 4; ++word) {
                const int row = lane / 4 + word % 2 * 8, column = lane % 4;
                const auto* const bytes = reinterpret_cast<const unsigned char*>(&product.a[lane][word]);
                if (element == Element::kTf32)
                    a[row][column + word / 2 * 4] = number_at(element, bytes, 0);
                else
                    for (int half = 0; half < 2; ++half)
                        a[row][2 * column + half + word / 2 * 8] = number_at(element, bytes, half);
            }
    }
    const Descriptor right(product.right);
    const int rows = product.transposed_right ? depth : columns,
              length = product.transposed_right ? columns : depth;
    for (int row = 0; row < rows; ++row)
        for (int first = 0; first < length; first += per_unit) {
            const unsigned char* const unit =
                right.unit(cta, row, first / per_unit * 16, product.transposed_right);
            for (int i = 0; i < per_unit; ++i) {
                const int k = product.transposed_right ? row : first + i,
                          n = product.transposed_right ? first + i : row;
                b[static_cast<std::size_t>(k * columns + n)] = number_at(element, unit, i);
            }
        }
    std::vector<float>& d = product.sum->d;
    if (!product.add) std::fill(d.begin(), d.end(), 0.0f);
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < depth; ++k) {
            float* const to = d.data() + i * columns;
            const float* const from = b.data() + k * columns;
            for (int n = 0; n < columns; ++n) to[n] += a[i][k] * from[n];
        }
    product.done = true;
}

// The number of a lane's element `e` of tile `tile` in d.
std::size_t place_in(int tiles, int lane, int tile, int e) {
    return static_cast<std::size_t>((lane / 4 + e / 2 * 8) * 8 * tiles + 8 * tile + lane % 4 * 2 + e % 2);
}

}  // namespace

void multiply_warpgroup(WarpgroupProduct own) {
    gather("wgmma.mma_async", ~0u, &own, [](Lanes lanes) {
        Cta& cta = running().cta();
        const int warp = running().current().warp;
        Products& all = cta.products[warp];
        const auto of = [&](int lane) -> const WarpgroupProduct& {
            if (!lanes[lane]) fail("wgmma after a lane of the warp has ended");
            return *static_cast<const WarpgroupProduct*>(lanes[lane]);
        };
        const WarpgroupProduct& first = of(0);
        std::unique_ptr<Products::Sum>& sum = all.sums[first.d[0]];
        const bool is_new = !sum;
        if (is_new) {
            if (!all.fenced) fail("wgmma on registers that none in flight has, without wgmma.fence");
            sum = std::make_unique<Products::Sum>();
            sum->tiles = first.tiles;
            sum->d.resize(static_cast<std::size_t>(16 * 8 * first.tiles));
        }
        Products::Product& product = all.in_flight.emplace_back();
        product = {.sum = sum.get(),
                   .element = first.element,
                   .add = first.add != 0,
                   .has_left = !first.a,
                   .a = {},
                   .left = first.left,
                   .right = first.right,
                   .transposed_left = first.transposed_left,
                   .transposed_right = first.transposed_right};
        ++sum->in_flight;
        const int kind =
            (((first.tiles * 2 + product.add) * 2 + product.has_left) * 2 + first.transposed_left) * 2 +
            first.transposed_right;
        for (const std::uint64_t what : {first.left, first.right, static_cast<std::uint64_t>(kind),
                                         static_cast<std::uint64_t>(first.element)})
            all.issued = (all.issued ^ what) * 0x9e3779b97f4a7c15u + 1;
        for (int lane = 0; lane < 32; ++lane) {
            const WarpgroupProduct& one = of(lane);
            if (one.left != first.left || one.right != first.right || (one.add != 0) != product.add)
                fail("wgmma whose operands differ between lanes");
            if (one.tiles != sum->tiles) fail("wgmma of another shape on registers of one in flight");
            if (one.a) std::copy_n(one.a, 4, product.a[lane]);
            sum->lanes[lane] = one.d[0];
            if (!is_new) continue;
            for (int tile = 0; tile < sum->tiles; ++tile)
                for (int e = 0; e < 4; ++e) {
                    float& number = one.d[tile][e];
                    sum->d[place_in(sum->tiles, lane, tile, e)] = number;
                    number = NAN;  // until it is waited for
                }
        }
        // Operands may be read at once, or as late as when they are waited for.
        if (settings.order % 2 == 1) multiply(cta, warp, product);
    });
}
void ptx::fence_products() { running().cta().products[running().current().warp].fenced = true; }
void ptx::commit_products() {
    gather("wgmma.commit_group", ~0u, nullptr, [](Lanes) {
        Products& all = running().cta().products[running().current().warp];
        all.groups.push_back(all.in_flight.size());
    });
}
void ptx::wait_products(int pending) {
    // All lanes wait for as many.
    gather("wgmma.wait_group", ~0u, &pending, [](Lanes lanes) {
        Cta& cta = running().cta();
        const int warp = running().current().warp;
        Products& all = cta.products[warp];
        const auto keep = static_cast<std::size_t>(*static_cast<const int*>(lanes[running().current().lane]));
        all.fenced = false;
        if (all.groups.size() <= keep) return;
        const std::size_t groups = all.groups.size() - keep, count = all.groups[groups - 1];
        for (std::size_t i = 0; i < count; ++i) {
            Products::Product& product = all.in_flight.front();
            if (!product.done) multiply(cta, warp, product);
            Products::Sum& sum = *product.sum;
            if (--sum.in_flight == 0) {
                for (int lane = 0; lane < 32; ++lane)
                    for (int tile = 0; tile < sum.tiles; ++tile)
                        for (int e = 0; e < 4; ++e)
                            sum.lanes[lane][4 * tile + e] = sum.d[place_in(sum.tiles, lane, tile, e)];
                all.sums.erase(sum.lanes[0]);
            }
            all.in_flight.pop_front();
        }
        all.groups.erase(all.groups.begin(), all.groups.begin() + static_cast<std::ptrdiff_t>(groups));
        for (std::size_t& end : all.groups) end -= count;
    });
}

}  // namespace emulator

CUresult emulated_encode_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                             const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                             const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    constexpr unsigned kElement = 2;
    if (rank < 1 || rank > 5 || reinterpret_cast<std::uintptr_t>(base) % 16 != 0) return 1;
    *map = {.base = base,
            .rank = rank,
            .element_bytes = kElement,
            .swizzle_mask = 0,
            .sizes = {},
            .strides = {},
            .box = {}};
    for (cuuint32_t d = 0; d < rank; ++d) {
        map->sizes[d] = sizes[d], map->box[d] = box[d];
        map->strides[d] = d == 0 ? kElement : strides[d - 1];
        if (sizes[d] == 0 || box[d] == 0 || box[d] > 256 || steps[d] != 1) return 1;
        if (d > 0 && (map->strides[d] % 16 != 0 || map->strides[d] >= std::uint64_t{1} << 40)) return 1;
    }
    const unsigned inner = box[0] * kElement;
    if (inner % 16 != 0) return 1;
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) {
        const unsigned span = 16u << static_cast<unsigned>(swizzle);
        if (inner > span) return 1;
        if (inner < span) throw std::runtime_error("emulator: rows of a tile shorter than its swizzle");
        map->swizzle_mask = span / 16 - 1;
    }
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    if (std::string(name) != "cuTensorMapEncodeTiled") return cudaErrorInvalidValue;
    *entry = reinterpret_cast<void*>(&emulated_encode_map);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
