// XXH3-128 of inputs of more than 240 bytes, with its own secret and no seed, as they come.
//
//   8 lanes of 64 bits; stripe s of a block, x = 64 bytes, k = secret[8 s ...]:
//       lane[i ^ 1] += x[i];   lane[i] += low32(x[i] ^ k[i]) * high32(x[i] ^ k[i])
//   after 16 stripes, a block:  lane = (lane ^ lane >> 47 ^ k[i]) * PRIME,  k = secret[128 ...]
//   the last 64 bytes are a stripe once more; then all lanes are folded into 128 bits
//
// After the specification of XXH3 (Y. Collet, github.com/Cyan4973/xxHash), whose constants these are.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace triptych {

class Xxh3 {
 public:
  static constexpr int STRIPE = 64;
  static constexpr int LEAST = 241;  // bytes of an input

  // The next `count` stripes; the input's last one, whole or not, is for `finish`.
  void add(const char* stripes, int64_t count) {
    while (count > 0) {
      const int64_t left = STRIPES_PER_BLOCK - stripe_, run = count < left ? count : left;
      accumulate(stripes, SECRET + 8 * stripe_, run);
      stripes += run * STRIPE, count -= run, stripe_ += run;
      if (stripe_ == STRIPES_PER_BLOCK) scramble(), stripe_ = 0;
    }
  }

  // The digest of `total` bytes that end with these 64; 16 bytes, the most significant one first.
  void finish(const char* last, uint64_t total, unsigned char* digest) {
    accumulate(last, SECRET + SECRET_BYTES - STRIPE - 7, 1);
    const uint64_t low = folded(SECRET + 11, total * PRIME64_1);
    const uint64_t high = folded(SECRET + SECRET_BYTES - STRIPE - 11, ~(total * PRIME64_2));
    for (int i = 0; i < 8; ++i) {
      digest[i] = static_cast<unsigned char>(high >> (56 - 8 * i));
      digest[8 + i] = static_cast<unsigned char>(low >> (56 - 8 * i));
    }
  }

 private:
  static constexpr int STRIPES_PER_BLOCK = 16;
  static constexpr int SECRET_BYTES = 192;
  static constexpr uint32_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
  static constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                            PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                            PRIME64_5 = 0x27D4EB2F165667C5;
  alignas(64) static constexpr unsigned char SECRET[SECRET_BYTES] = {
      0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
      0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
      0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
      0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
      0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
      0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
      0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
      0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
      0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
      0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
      0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
      0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
  };

  static uint64_t load(const void* from) {
    uint64_t x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }

  // Stripes of one block, whose secrets are 8 bytes apart.
  void accumulate(const char* x, const unsigned char* k, int64_t count) {
#if defined(__AVX512F__)
    __m512i lanes = _mm512_load_si512(lanes_);
    for (; count > 0; --count, x += STRIPE, k += 8) {
      const __m512i data = _mm512_loadu_si512(x);
      const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(k));
      const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
      const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
      lanes = _mm512_add_epi64(lanes, _mm512_add_epi64(product, swapped));
    }
    _mm512_store_si512(lanes_, lanes);
#elif defined(__AVX2__)
    __m256i* const kept = reinterpret_cast<__m256i*>(lanes_);
    __m256i lanes[2] = {kept[0], kept[1]};
    for (; count > 0; --count, x += STRIPE, k += 8) {
      for (int half = 0; half < 2; ++half) {
        const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x) + half);
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(k) + half);
        const __m256i mixed = _mm256_xor_si256(data, key);
        const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        const __m256i swapped = _mm256_shuffle_epi32(data, 0x4e);
        lanes[half] = _mm256_add_epi64(lanes[half], _mm256_add_epi64(product, swapped));
      }
    }
    kept[0] = lanes[0], kept[1] = lanes[1];
#else
    for (; count > 0; --count, x += STRIPE, k += 8) {
      for (int i = 0; i < 8; ++i) {
        const uint64_t data = load(x + 8 * i), mixed = data ^ load(k + 8 * i);
        lanes_[i ^ 1] += data;
        lanes_[i] += (mixed & 0xffffffff) * (mixed >> 32);
      }
    }
#endif
  }

  void scramble() {
    for (int i = 0; i < 8; ++i) {
      const uint64_t key = load(SECRET + SECRET_BYTES - STRIPE + 8 * i);
      lanes_[i] = (lanes_[i] ^ (lanes_[i] >> 47) ^ key) * PRIME32_1;
    }
  }

  uint64_t folded(const unsigned char* k, uint64_t sum) const {
    for (int i = 0; i < 8; i += 2) {
      const uint64_t a = lanes_[i] ^ load(k + 8 * i), b = lanes_[i + 1] ^ load(k + 8 * i + 8);
      const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
      sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9;
    return sum ^ (sum >> 32);
  }

  alignas(64) uint64_t lanes_[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                    PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
  int64_t stripe_ = 0;  // of the block
};

}  // namespace triptych
