/* Chained block hashes: SHA-256 (FIPS 180-4) over many short messages in one call.

   hash of block i = SHA-256(hash of block i - 1 | bytes of block i)

All messages of a call are equally long, so their padding is written once:

   |<- parent: 32 ->|<- block_bytes ->| 0x80 | 0 ... 0 | length in bits: 8 |
   |<------------------- a multiple of 64 bytes -------------------------->|
*/
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define DIGEST 32
#define CHUNK 64

/* Fractions of the roots of the first primes; sections 4.2.2 and 5.3.3. */
static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

typedef void Compress(uint32_t state[8], const uint8_t *chunks, size_t num_chunks);

static uint32_t load_word(const uint8_t *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void store_word(uint8_t *bytes, uint32_t word) {
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(word >> (24 - 8 * i));
}

static uint32_t rotr(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress_portable(uint32_t state[8], const uint8_t *chunks, size_t num_chunks) {
    for (; num_chunks > 0; num_chunks--, chunks += CHUNK) {
        uint32_t w[64], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4],
                        f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 16; t++) w[t] = load_word(chunks + 4 * t);
        for (int t = 16; t < 64; t++) {
            uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
            uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
            w[t] = s1 + w[t - 7] + s0 + w[t - 16];
        }
        for (int t = 0; t < 64; t++) {
            uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                          K[t] + w[t];
            uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

static int has_instructions(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

/* The instructions want the state as (a b e f) and (c d g h), highest word first, and do
   two rounds each. Wants a CPU for which has_instructions() holds. */
__attribute__((target("sha,sse4.1"))) static void compress_instructions(
    uint32_t state[8], const uint8_t *chunks, size_t num_chunks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
    __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);
    for (; num_chunks > 0; num_chunks--, chunks += CHUNK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { /* four rounds each */
            if (i < 4) {
                w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)chunks + i), swap);
            } else {
                /* From the words 16, 15, 7 and 2 before; w holds the last 16. */
                const __m128i last = w[(i + 3) % 4];
                const __m128i seventh = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
                w[i % 4] = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seventh);
                w[i % 4] = _mm_sha256msg2_epu32(w[i % 4], last);
            }
            __m128i wk = _mm_add_epi32(w[i % 4], _mm_load_si128((const __m128i *)K + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#else
static int has_instructions(void) { return 0; }
#define compress_instructions compress_portable
#endif

EXPORT int tokend_has_sha_instructions(void) { return has_instructions(); }

/* parent: [32]; blocks: [num_blocks, block_bytes]; digests: [num_blocks, 32], written.
   with_instructions: use those of the CPU, which must have them.
   Returns 0, or 1 when there is no memory for one message. */
EXPORT int tokend_hash_blocks(int with_instructions, const uint8_t *parent, const uint8_t *blocks,
                              int64_t num_blocks, int64_t block_bytes, uint8_t *digests) {
    Compress *compress = with_instructions ? compress_instructions : compress_portable;
    const size_t used = DIGEST + (size_t)block_bytes;
    const size_t num_chunks = (used + 9 + CHUNK - 1) / CHUNK;
    uint8_t *message = calloc(num_chunks, CHUNK);
    if (message == NULL) return 1;
    message[used] = 0x80;
    store_word(message + num_chunks * CHUNK - 8, (uint32_t)((uint64_t)used >> 29));
    store_word(message + num_chunks * CHUNK - 4, (uint32_t)((uint64_t)used << 3));
    for (int64_t i = 0; i < num_blocks; i++) {
        uint32_t state[8];
        memcpy(state, INITIAL, sizeof state);
        memcpy(message, parent, DIGEST);
        memcpy(message + DIGEST, blocks + i * block_bytes, (size_t)block_bytes);
        compress(state, message, num_chunks);
        for (int j = 0; j < 8; j++) store_word(digests + 4 * j, state[j]);
        parent = digests;
        digests += DIGEST;
    }
    free(message);
    return 0;
}
