#include "coded_packing.h"

#include <cstring>

namespace quire {

namespace {

constexpr uint64_t kBytes = 0x0101010101010101;  // times a byte: that byte, eight times

// Spreads the eight codes in the low 8 * bits bits to bytes: fours to halves, twos to quarters, then bytes.
uint64_t spread(uint64_t codes, int bits) {
  const uint64_t four = ((uint64_t)1 << 4 * bits) - 1, two = (((uint64_t)1 << 2 * bits) - 1) * 0x100000001;
  const uint64_t one = (((uint64_t)1 << bits) - 1) * 0x0001000100010001;
  codes = (codes & four) | (codes & ~four) << (32 - 4 * bits);
  codes = (codes & two) | (codes & ~two) << (16 - 2 * bits);
  return (codes & one) | (codes & ~one) << (8 - bits);
}

// Unpacks `count` codes from input `first` on, a multiple of 32, to bytes; the others of the unit are 0.
void read_unit(const CodedSource& source, int bits, int64_t output, int64_t first, int64_t count,
               uint64_t* codes) {
  uint8_t bytes[kCodedUnit + 8]{};
  const int64_t begin = first * bits / 8, whole = kCodedUnit * bits / 8, left = source.row_bytes - begin;
  std::memcpy(bytes, source.packed + output * source.stride + begin, (size_t)(left < whole ? left : whole));
  const uint64_t flip = source.is_signed ? kBytes << (bits - 1) : 0;
  const uint64_t mask = bits == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * bits) - 1;
  for (int i = 0; i < kCodedUnit / 8; ++i) {
    uint64_t eight;
    std::memcpy(&eight, bytes + i * bits, 8);
    codes[i] = spread(eight & mask, bits) ^ flip;
    const int64_t here = count - 8 * i;
    if (here < 8) codes[i] &= here <= 0 ? 0 : ((uint64_t)1 << 8 * here) - 1;
  }
}

// Adds the codes of one output to a unit of the panel.
void add_codes(const uint64_t* codes, const Coding& coding, int64_t lane, uint8_t* unit) {
  const int bits = coding.bits;
  if (coding.float8()) {
    for (int k = 0; k < kCodedUnit; k += 2) {
      const uint16_t pair = (uint16_t)(codes[k / 8] >> k % 8 * 8);
      std::memcpy(unit + float8_place(k, lane), &pair, 2);
    }
    return;
  }
  unit += lane * 4;
  for (int plane = bits == 8 ? 8 : 4, low = 0; plane > 0; plane /= 2) {
    if (!(bits & plane)) continue;
    const int inputs = 32 / plane;  // in 64 bytes
    const uint64_t mask = kBytes * ((1u << plane) - 1);
    for (int k = 0; k < kCodedUnit; k += inputs, unit += 64) {
      uint32_t word = 0;
      for (int i = 0; i < inputs; i += 4) {
        const uint64_t part = (codes[(k + i) / 8] >> low) & mask;
        word |= (uint32_t)(i % 8 + k % 8 ? part >> 32 : part) << (i / 4 * plane);
      }
      std::memcpy(unit, &word, 4);
    }
    low += plane;
  }
}

// Copies the numbers of groups [first, first + count) of one output to the header of block `block`.
void put_numbers(const GroupNumbers& from, int64_t output, int64_t groups, int64_t first, int64_t block,
                 int64_t count, int64_t lane, uint8_t* to) {
  const int64_t size = from.value_bytes;
  const uint8_t* row = from.values + output * from.num_values * size;
  if (from.codes != nullptr) {
    const int64_t codes_at = size * kPanel;
    std::memcpy(to + lane * size, row + (from.num_values == 1 ? 0 : block) * size, (size_t)size);
    for (int64_t g = 0; g < count; ++g)
      to[codes_at + g * kPanel + lane] = from.codes[output * groups + first + g];
    return;
  }
  for (int64_t g = 0; g < count; ++g)
    std::memcpy(to + (g * kPanel + lane) * size, row + (first + g) * size, (size_t)size);
}

void put_six_bits(const CodedSource& source, int64_t output, int64_t first, int64_t block, int64_t count,
                  int64_t lane, uint8_t* to) {
  uint32_t words[3]{};
  const GroupNumbers* const both[] = {&source.scales, &source.minimums};
  for (int i = 0; i < 2; ++i) {
    const GroupNumbers& from = *both[i];
    const int64_t value = from.num_values == 1 ? 0 : block;
    std::memcpy(to + i * 32 + lane * 2, from.values + (output * from.num_values + value) * 2, 2);
    for (int64_t g = 0; g < count; ++g) {
      const uint32_t code = from.codes[output * source.groups + first + g];
      words[i] |= (code & 15) << (4 * g);
      words[2] |= (code >> 4 & 3) << (16 * i + 2 * g);
    }
  }
  for (int i = 0; i < 3; ++i) std::memcpy(to + 64 + i * 64 + lane * 4, words + i, 4);
}

void put_header(const CodedSource& source, const Coding& c, int64_t output, int64_t block, int64_t lane,
                uint8_t* to) {
  const int64_t first = block * kCodedBlock / source.group;  // a long group is in several blocks
  const int64_t left = source.groups - first, count = left < c.groups() ? left : c.groups();
  if (c.scales == ScaleForm::f16_u6) return put_six_bits(source, output, first, block, count, lane, to);
  put_numbers(source.scales, output, source.groups, first, block, count, lane, to);
  if (c.minimums != ScaleForm::none)
    put_numbers(source.minimums, output, source.groups, first, block, count, lane, to + c.minimums_at());
  if (c.zeros)
    for (int64_t g = 0; g < count; ++g)
      to[c.zeros_at() + g * kPanel + lane] = source.zeros[output * source.groups + first + g];
}

}  // namespace

void pack_coded(const CodedSource& source, const Panels& to, int64_t first, int64_t last) {
  const Coding& c = to.coding;
  const int64_t panel_bytes = to.panel_bytes(), header = c.header_bytes();
  for (int64_t panel = first; panel < last; ++panel) {
    uint8_t* at = (uint8_t*)to.values + panel * panel_bytes;
    std::memset(at, 0, (size_t)panel_bytes);
    const int64_t left = source.outputs - panel * kPanel, lanes = left < kPanel ? left : kPanel;
    for (int64_t k = 0; k < source.inputs; k += kCodedUnit, at += c.unit_bytes()) {
      const int64_t count = source.inputs - k < kCodedUnit ? source.inputs - k : kCodedUnit;
      const bool begins = k % kCodedBlock == 0;
      uint64_t codes[kCodedUnit / 8];
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t output = panel * kPanel + lane;
        if (begins) put_header(source, c, output, k / kCodedBlock, lane, at);
        read_unit(source, c.bits, output, k, count, codes);
        add_codes(codes, c, lane, at + (begins ? header : 0));
      }
      if (begins) at += header;
    }
  }
}

}  // namespace quire
