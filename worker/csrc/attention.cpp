// Causal attention over paged K and V with an online softmax in float32
// (Milakov, Gimelshein 2018; the pieces of a long context as in Flash-Decoding).
//
// Two ways to compute a piece of a tile, by the number of its rows:
//   few rows   (decode) lanes run over head_dim; bound by reading KV once
//   many rows  (prefill) lanes run over the rows; bound by arithmetic
// Both take KV in chunks of CHUNK tokens and leave, per row, the unnormalised
// output, the largest raw score and the sum of weights.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace tokend {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_M = 8;  // accumulators: TILE_M x TILE_N vectors
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE_M = 4;
#else
constexpr int LANES = 4;
constexpr int TILE_M = 4;
#endif
constexpr int TILE_N = 3;
constexpr int CHUNK = 64;
constexpr int64_t FEW_ROWS = 8;
constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Where one piece of a tile stands, resolved from the plan.
template <class T>
struct Piece {
    const TokendStep* step;
    const TokendLayer* layer;
    const TokendTile* tile;
    int64_t group;
    int64_t rows;
    int64_t head_dim;
    int64_t begin, end;    // KV tokens
    int64_t first_limit;   // tokens that the tile's first query sees
    float scale;

    Piece(const TokendStep* s, const TokendLayer* l, const TokendTile* t, int64_t index)
        : step(s), layer(l), tile(t) {
        group = s->num_heads / s->num_kv_heads;
        rows = t->query_count * group;
        head_dim = s->head_dim;
        begin = index * t->piece_len;
        end = std::min<int64_t>(begin + t->piece_len, t->kv_len);
        first_limit = t->kv_len - t->query_count + 1;
        scale = float(s->scale);
    }

    int64_t limit(int64_t row) const { return first_limit + row / group; }

    const T* query(int64_t row) const {
        const int64_t token = step->query_start[tile->seq] + tile->query_begin + row / group;
        const int64_t head = tile->kv_head * group + row % group;
        return static_cast<const T*>(layer->query) + token * layer->query_stride + head * head_dim;
    }

    T* output(int64_t row) const {
        const int64_t token = step->query_start[tile->seq] + tile->query_begin + row / group;
        const int64_t head = tile->kv_head * group + row % group;
        return static_cast<T*>(layer->output) + (token * step->num_heads + head) * head_dim;
    }

    // Rows of K and V of tokens [from, to).
    void locate(int64_t from, int64_t to, const T** keys, const T** values) const {
        const int32_t* table = step->block_table + tile->seq * step->max_blocks;
        const int64_t head_offset = tile->kv_head * layer->head_stride;
        const T* key_pages = static_cast<const T*>(layer->key_pages) + head_offset;
        const T* value_pages = static_cast<const T*>(layer->value_pages) + head_offset;
        int64_t page = from / step->block_size, offset = from % step->block_size;
        for (int64_t token = from; token < to; page++, offset = 0) {
            const int64_t run = std::min(step->block_size - offset, to - token);
            const int64_t start = table[page] * layer->block_stride + offset * head_dim;
            for (int64_t i = 0; i < run; i++) {
                *keys++ = key_pages + start + i * head_dim;
                *values++ = value_pages + start + i * head_dim;
            }
            token += run;
        }
    }
};

// Memory of one thread, kept between calls.
class Scratch {
  public:
    // The first `size` floats, on a cache line boundary.
    float* floats(size_t size) {
        if (buffer_.size() < size + 16) buffer_.resize(size + 16);
        const auto address = reinterpret_cast<uintptr_t>(buffer_.data());
        return reinterpret_cast<float*>((address + 63) & ~uintptr_t(63));
    }

  private:
    std::vector<float> buffer_;
};

// ---- few rows: lanes over head_dim ------------------------------------------

// Dot products of R query rows with four K rows: parts[r] as sum_four leaves them.
template <int N, int R, class T>
TOKEND_INLINE void dot_four(const T* const* queries, const T* const* keys, int64_t head_dim, F<N>* parts) {
    F<N> sums[R][4] = {};
    int64_t dim = 0;
#if defined(__AVX512BF16__)
    if constexpr (N == 16 && std::is_same_v<T, bfloat16>) {
        for (; dim + 32 <= head_dim; dim += 32) {
            __m512bh query[R];
            for (int r = 0; r < R; r++) query[r] = load_bytes<__m512bh>(queries[r] + dim);
            for (int t = 0; t < 4; t++) {
                const auto key = load_bytes<__m512bh>(keys[t] + dim);
                for (int r = 0; r < R; r++)
                    sums[r][t] = (F<N>)_mm512_dpbf16_ps((__m512)sums[r][t], query[r], key);
            }
        }
    }
#endif
    for (; dim < head_dim; dim += N) {
        F<N> query[R];
        for (int r = 0; r < R; r++) query[r] = load<N>(queries[r] + dim);
        for (int t = 0; t < 4; t++) {
            const F<N> key = load<N>(keys[t] + dim);
            for (int r = 0; r < R; r++) sums[r][t] += query[r] * key;
        }
    }
    for (int r = 0; r < R; r++)
        parts[r] = sum_four<N>(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
}

// scores[r][t] for R rows and `count` tokens, count a multiple of N.
template <int N, int R, class T>
void few_scores(const T* const* queries, const T* const* keys, int64_t count, int64_t head_dim, float* scores) {
    for (int64_t token = 0; token < count; token += N) {
        F<N> parts[R][N / 4], four[R];
        for (int part = 0; part < N / 4; part++) {
            dot_four<N, R, T>(queries, keys + token + part * 4, head_dim, four);
            for (int r = 0; r < R; r++) parts[r][part] = four[r];
        }
        for (int r = 0; r < R; r++) store<N>(scores + r * CHUNK + token, gather_sums<N>(parts[r]));
    }
}

// output[r][dims] = output * rescale[r] + weights[r][t] · V[t][dims], over V vectors of dims.
template <int N, int R, int V, class T>
TOKEND_INLINE void few_values_slice(const float* weights, const float* rescale, const T* const* values,
                                    int64_t count, int64_t dim, float* output, int64_t head_dim) {
    F<N> sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++)
            sums[r][v] = load<N>(output + r * head_dim + dim + v * N) * rescale[r];
    for (int64_t token = 0; token < count; token++) {
        F<N> weight[R];
        for (int r = 0; r < R; r++) weight[r] = splat<N>(weights[r * CHUNK + token]);
        for (int v = 0; v < V; v++) {
            const F<N> value = load<N>(values[token] + dim + v * N);
            for (int r = 0; r < R; r++) sums[r][v] += weight[r] * value;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store<N>(output + r * head_dim + dim + v * N, sums[r][v]);
}

template <int N, int R, class T>
void few_values(const float* weights, const float* rescale, const T* const* values, int64_t count,
                float* output, int64_t head_dim) {
    constexpr int V = N == 16 ? 4 : 3;
    int64_t dim = 0;
    for (; dim + V * N <= head_dim; dim += V * N)
        few_values_slice<N, R, V, T>(weights, rescale, values, count, dim, output, head_dim);
    for (; dim < head_dim; dim += N)
        few_values_slice<N, R, 1, T>(weights, rescale, values, count, dim, output, head_dim);
}

// Turns scores[0, seen) of one row into weights, the rest of the chunk into zeros.
// Returns by how much what was summed before must be scaled.
TOKEND_INLINE float weigh_row(float* scores, int64_t seen, float scale, float* best, float* total) {
    constexpr int N = LANES;
    for (int64_t token = std::max<int64_t>(seen, 0); token < CHUNK; token++) scores[token] = NO_SCORE;
    if (seen <= 0) {
        for (int token = 0; token < CHUNK; token++) scores[token] = 0.0f;
        return 1.0f;
    }
    F<N> largest = load<N>(scores);
    for (int token = N; token < CHUNK; token += N) largest = maximum<N>(largest, load<N>(scores + token));
    const float new_best = std::max(*best, max_lanes<N>(largest));
    const float rescale = std::exp((*best - new_best) * scale);
    F<N> sum = {};
    for (int token = 0; token < CHUNK; token += N) {
        const F<N> weight = exp_nonpositive<N>((load<N>(scores + token) - new_best) * scale);
        store<N>(scores + token, weight);
        sum += weight;
    }
    *total = *total * rescale + sum_lanes<N>(sum);
    *best = new_best;
    return rescale;
}

template <int N, int R, class T>
void few_rows_chunk(const Piece<T>& piece, int64_t row, int64_t from, int64_t count, const T* const* keys,
                    const T* const* values, float* output, float* best, float* total) {
    alignas(64) float scores[R * CHUNK];
    float rescale[R];
    const T* queries[R];
    for (int r = 0; r < R; r++) queries[r] = piece.query(row + r);
    few_scores<N, R, T>(queries, keys, round_up(count, N), piece.head_dim, scores);
    for (int r = 0; r < R; r++) {
        const int64_t seen = std::min(count, piece.limit(row + r) - from);
        rescale[r] = weigh_row(scores + r * CHUNK, seen, piece.scale, best + row + r, total + row + r);
    }
    few_values<N, R, T>(scores, rescale, values, count, output + row * piece.head_dim, piece.head_dim);
}

// output [rows, head_dim], best [rows], total [rows]
template <int N, class T>
void few_rows(const Piece<T>& piece, float* output, float* best, float* total) {
    const T *keys[2][CHUNK + N], *values[2][CHUNK + N];
    piece.locate(piece.begin, std::min(piece.begin + CHUNK, piece.end), keys[0], values[0]);
    int now = 0;
    for (int64_t from = piece.begin; from < piece.end; from += CHUNK, now ^= 1) {
        const int64_t count = std::min<int64_t>(CHUNK, piece.end - from);
        const int64_t next = std::min<int64_t>(CHUNK, piece.end - from - count);
        if (next > 0) piece.locate(from + count, from + count + next, keys[now ^ 1], values[now ^ 1]);
        // Scores come N at a time: past the end, repeat a row that may be read.
        for (int64_t token = count; token < round_up(count, N); token++) keys[now][token] = keys[now][0];
        int64_t row = 0;
        for (; row + 4 <= piece.rows; row += 4)
            few_rows_chunk<N, 4, T>(piece, row, from, count, keys[now], values[now], output, best, total);
        const int64_t left = piece.rows - row;
        if (left == 3)
            few_rows_chunk<N, 3, T>(piece, row, from, count, keys[now], values[now], output, best, total);
        if (left == 2)
            few_rows_chunk<N, 2, T>(piece, row, from, count, keys[now], values[now], output, best, total);
        if (left == 1)
            few_rows_chunk<N, 1, T>(piece, row, from, count, keys[now], values[now], output, best, total);
    }
}

// ---- many rows: lanes over the rows -------------------------------------------

// scores[m][n] = K[m] · Q[:, n] for TILE_M tokens and V vectors of rows.
template <int V>
void many_scores_tile(const float* const* keys, const float* queries, int64_t head_dim, int64_t width, float* scores) {
    constexpr int N = LANES;
    F<N> sums[TILE_M][V] = {};
    for (int64_t dim = 0; dim < head_dim; dim++) {
        F<N> query[V];
        for (int v = 0; v < V; v++) query[v] = load<N>(queries + dim * width + v * N);
        for (int m = 0; m < TILE_M; m++) {
            const F<N> key = splat<N>(keys[m][dim]);
            for (int v = 0; v < V; v++) sums[m][v] += key * query[v];
        }
    }
    for (int m = 0; m < TILE_M; m++)
        for (int v = 0; v < V; v++) store<N>(scores + m * width + v * N, sums[m][v]);
}

// output[m][n] += sum over tokens of V[token][m] * weights[token][n], TILE_M dims.
template <int V>
void many_values_tile(const float* const* values, int64_t dim, const float* weights, int64_t count, int64_t width,
                      float* output) {
    constexpr int N = LANES;
    F<N> sums[TILE_M][V];
    for (int m = 0; m < TILE_M; m++)
        for (int v = 0; v < V; v++) sums[m][v] = load<N>(output + m * width + v * N);
    for (int64_t token = 0; token < count; token++) {
        const float* value = values[token] + dim;
        F<N> weight[V];
        for (int v = 0; v < V; v++) weight[v] = load<N>(weights + token * width + v * N);
        for (int m = 0; m < TILE_M; m++) {
            const F<N> one = splat<N>(value[m]);
            for (int v = 0; v < V; v++) sums[m][v] += one * weight[v];
        }
    }
    for (int m = 0; m < TILE_M; m++)
        for (int v = 0; v < V; v++) store<N>(output + m * width + v * N, sums[m][v]);
}

// Calls body with the widest tiles that fit into `width` rows: body(column, integral V).
template <class Body>
TOKEND_INLINE void over_columns(int64_t width, Body body) {
    int64_t column = 0;
    for (; column + TILE_N * LANES <= width; column += TILE_N * LANES)
        body(column, std::integral_constant<int, TILE_N>());
    if (width - column == 2 * LANES) body(column, std::integral_constant<int, 2>());
    if (width - column == LANES) body(column, std::integral_constant<int, 1>());
}

// The working memory of many_rows; width = rows rounded up to whole vectors.
struct ManyRows {
    int64_t width;
    float* queries;  // [head_dim, width]
    float* scores;   // [CHUNK, width]
    float* output;   // [head_dim, width]
    float* best;     // [width]
    float* total;    // [width]
    float* limit;    // [width], as floats
    float* keys;     // [CHUNK, head_dim]
    float* values;   // [CHUNK, head_dim]

    ManyRows(Scratch& scratch, int64_t rows, int64_t head_dim) : width(round_up(rows, LANES)) {
        const int64_t square = head_dim * width, chunk = CHUNK * head_dim;
        float* at = scratch.floats(2 * square + CHUNK * width + 3 * width + 2 * chunk);
        const auto take = [&at](int64_t size) { return std::exchange(at, at + size); };
        queries = take(square);
        output = take(square);
        scores = take(CHUNK * width);
        best = take(width);
        total = take(width);
        limit = take(width);
        keys = take(chunk);
        values = take(chunk);
        std::fill_n(queries, square, 0.0f);
        std::fill_n(output, square, 0.0f);
        std::fill_n(best, width, NO_SCORE);
        std::fill_n(total, width, 0.0f);
        std::fill_n(limit, width, 0.0f);
    }
};

// Float rows of `count` tokens: the pages themselves, or a converted copy.
template <class T>
void as_floats(const T* const* rows, int64_t count, int64_t head_dim, float* copy, const float** floats) {
    for (int64_t token = 0; token < count; token++) {
        if constexpr (std::is_same_v<T, float>) {
            floats[token] = rows[token];
        } else {
            floats[token] = copy + token * head_dim;
            for (int64_t dim = 0; dim < head_dim; dim += 8)
                store<8>(copy + token * head_dim + dim, load<8>(rows[token] + dim));
        }
    }
}

// Online softmax of one chunk, vector of rows by vector of rows. `from` is the
// chunk's first token; rows that see none of it keep all they have.
void weigh_chunk(ManyRows& tile, int64_t from, int64_t count, bool all_seen, float scale, int64_t head_dim) {
    constexpr int N = LANES;
    for (int64_t column = 0; column < tile.width; column += N) {
        float* scores = tile.scores + column;
        const F<N> seen = load<N>(tile.limit + column) - float(from);
        F<N> largest = load<N>(tile.best + column);
        for (int64_t token = 0; token < count; token++) {
            F<N> score = load<N>(scores + token * tile.width);
            if (!all_seen) {
                score = seen > float(token) ? score : splat<N>(NO_SCORE);
                store<N>(scores + token * tile.width, score);
            }
            largest = maximum<N>(largest, score);
        }
        // A row without any score yet must not compute infinity minus infinity.
        const F<N> best = load<N>(tile.best + column);
        const F<N> shift = largest == NO_SCORE ? F<N>{} : largest;
        const F<N> rescale = exp_nonpositive<N>((best - shift) * scale);
        F<N> sum = load<N>(tile.total + column) * rescale;
        for (int64_t token = 0; token < count; token++) {
            const F<N> weight = exp_nonpositive<N>((load<N>(scores + token * tile.width) - shift) * scale);
            store<N>(scores + token * tile.width, weight);
            sum += weight;
        }
        store<N>(tile.best + column, largest);
        store<N>(tile.total + column, sum);
        if (min_lanes<N>(rescale) == 1.0f) continue;
        for (int64_t dim = 0; dim < head_dim; dim++) {
            float* output = tile.output + dim * tile.width + column;
            store<N>(output, load<N>(output) * rescale);
        }
    }
}

template <class T>
void many_rows(const Piece<T>& piece, ManyRows& tile) {
    const int64_t head_dim = piece.head_dim, width = tile.width;
    for (int64_t row = 0; row < piece.rows; row++) {
        alignas(64) float query[8];
        tile.limit[row] = float(piece.limit(row));
        for (int64_t dim = 0; dim < head_dim; dim += 8) {
            store<8>(query, load<8>(piece.query(row) + dim));
            for (int i = 0; i < 8; i++) tile.queries[(dim + i) * width + row] = query[i];
        }
    }
    const T *keys[CHUNK], *values[CHUNK];
    const float *float_keys[CHUNK + TILE_M], *float_values[CHUNK];
    for (int64_t from = piece.begin; from < piece.end; from += CHUNK) {
        const int64_t count = std::min<int64_t>(CHUNK, piece.end - from);
        piece.locate(from, from + count, keys, values);
        as_floats(keys, count, head_dim, tile.keys, float_keys);
        as_floats(values, count, head_dim, tile.values, float_values);
        for (int64_t token = count; token < round_up(count, TILE_M); token++) float_keys[token] = float_keys[0];
        over_columns(width, [&](int64_t column, auto vectors) {
            for (int64_t token = 0; token < count; token += TILE_M)
                many_scores_tile<vectors>(float_keys + token, tile.queries + column, head_dim, width,
                                          tile.scores + token * width + column);
        });
        weigh_chunk(tile, from, count, from + count <= piece.first_limit, piece.scale, head_dim);
        over_columns(width, [&](int64_t column, auto vectors) {
            for (int64_t dim = 0; dim < head_dim; dim += TILE_M)
                many_values_tile<vectors>(float_values, dim, tile.scores + column, count, width,
                                          tile.output + dim * width + column);
        });
    }
}

// ---- results ----------------------------------------------------------------------

// | output, head_dim floats | largest raw score | sum of weights | padding |
int64_t partial_width(int64_t head_dim) { return head_dim + 8; }

// Leaves one row: final when the tile has one piece, else as a partial result.
template <class T>
void finish_row(const Piece<T>& piece, const TokendPlan* plan, int64_t index, int64_t row, const float* output,
                float best, float total) {
    if (piece.tile->pieces == 1) {
        T* to = piece.output(row);
        for (int64_t dim = 0; dim < piece.head_dim; dim += 8)
            store<8>(to + dim, load<8>(output + dim) / total);
        return;
    }
    const int64_t at = piece.tile->partial_row + index * piece.rows + row;
    float* partial = plan->partials + at * partial_width(piece.head_dim);
    std::copy_n(output, piece.head_dim, partial);
    partial[piece.head_dim] = best;
    partial[piece.head_dim + 1] = total;
}

template <class T>
void compute_piece(const Piece<T>& piece, const TokendPlan* plan, int64_t index, Scratch& scratch) {
    const int64_t head_dim = piece.head_dim;
    if (piece.rows <= FEW_ROWS) {
        float* output = scratch.floats(piece.rows * head_dim);
        float best[FEW_ROWS], total[FEW_ROWS] = {};
        std::fill_n(output, piece.rows * head_dim, 0.0f);
        std::fill_n(best, FEW_ROWS, NO_SCORE);
        if (head_dim % LANES == 0)
            few_rows<LANES, T>(piece, output, best, total);
        else
            few_rows<8, T>(piece, output, best, total);
        for (int64_t row = 0; row < piece.rows; row++)
            finish_row(piece, plan, index, row, output + row * head_dim, best[row], total[row]);
        return;
    }
    ManyRows tile(scratch, piece.rows, head_dim);
    many_rows(piece, tile);
    for (int64_t row = 0; row < piece.rows; row++) {
        float* output = tile.keys;  // free by now, and holds a row
        for (int64_t dim = 0; dim < head_dim; dim++) output[dim] = tile.output[dim * tile.width + row];
        finish_row(piece, plan, index, row, output, tile.best[row], tile.total[row]);
    }
}

// Joins the partial results of one row of a tile.
template <class T>
void join_row(const Piece<T>& piece, const TokendPlan* plan, int64_t row, float* sum) {
    const int64_t head_dim = piece.head_dim, width = partial_width(head_dim);
    const float* first = plan->partials + (piece.tile->partial_row + row) * width;
    const int64_t step = piece.rows * width;
    float best = NO_SCORE, total = 0.0f;
    for (int64_t index = 0; index < piece.tile->pieces; index++)
        best = std::max(best, first[index * step + head_dim]);
    std::fill_n(sum, head_dim, 0.0f);
    for (int64_t index = 0; index < piece.tile->pieces; index++) {
        const float* part = first + index * step;
        const float weight = std::exp((part[head_dim] - best) * piece.scale);
        total += weight * part[head_dim + 1];
        for (int64_t dim = 0; dim < head_dim; dim += 8)
            store<8>(sum + dim, load<8>(sum + dim) + load<8>(part + dim) * weight);
    }
    T* to = piece.output(row);
    for (int64_t dim = 0; dim < head_dim; dim += 8) store<8>(to + dim, load<8>(sum + dim) / total);
}

template <class T>
void write_token(const TokendStep* step, const TokendLayer* layer, int64_t token) {
    const int64_t slot = step->slot_mapping[token], head_dim = step->head_dim;
    const int64_t start = slot / step->block_size * layer->block_stride + slot % step->block_size * head_dim;
    const T* key = static_cast<const T*>(layer->key) + token * layer->key_stride;
    const T* value = static_cast<const T*>(layer->value) + token * layer->value_stride;
    for (int64_t head = 0; head < step->num_kv_heads; head++) {
        const int64_t to = start + head * layer->head_stride;
        std::copy_n(key + head * head_dim, head_dim, static_cast<T*>(layer->key_pages) + to);
        std::copy_n(value + head * head_dim, head_dim, static_cast<T*>(layer->value_pages) + to);
    }
}

template <class T>
void run(const TokendStep* step, const TokendPlan* plan, const TokendLayer* layer) {
#pragma omp parallel
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(static)
        for (int64_t token = 0; token < step->num_tokens; token++) write_token<T>(step, layer, token);
#pragma omp for schedule(dynamic, 1)
        for (int64_t index = 0; index < plan->num_tasks; index++) {
            const TokendTask task = plan->tasks[index];
            const Piece<T> piece(step, layer, plan->tiles + task.tile, task.piece);
            compute_piece(piece, plan, task.piece, scratch);
        }
        if (plan->num_partial_rows > 0) {
#pragma omp for schedule(static)
            for (int64_t index = 0; index < plan->num_tiles; index++) {
                if (plan->tiles[index].pieces == 1) continue;
                const Piece<T> piece(step, layer, plan->tiles + index, 0);
                float* sum = scratch.floats(step->head_dim);
                for (int64_t row = 0; row < piece.rows; row++) join_row(piece, plan, row, sum);
            }
        }
    }
}

}  // namespace
}  // namespace tokend

extern "C" int64_t tokend_partial_width(int64_t head_dim) { return tokend::partial_width(head_dim); }

extern "C" void tokend_attention_run(const TokendStep* step, const TokendPlan* plan, const TokendLayer* layer) {
    switch (layer->dtype) {
        case TOKEND_FLOAT32: return tokend::run<float>(step, plan, layer);
        case TOKEND_BFLOAT16: return tokend::run<tokend::bfloat16>(step, plan, layer);
        case TOKEND_FLOAT16: return tokend::run<tokend::float16>(step, plan, layer);
    }
}
