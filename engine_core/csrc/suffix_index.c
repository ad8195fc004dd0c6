/* An index of token sequences that finds where the end of a sequence occurred before.

   Chains of positions with the same last k tokens, as in LZ77 compressors (RFC 1951, section 4),
   for a few orders k, over a ring of tokens:

       tokens      | a b c | a b d | a b c | a b ?      the last 2 tokens, "a b", occurred at
       previous            <------ + <---- + <-- +      three earlier positions

   A token costs a few nanoseconds and 4 + 8 * (number of orders) bytes, and the oldest ones are
   overwritten when the ring is full. Most recent occurrences count: a lookup visits a limited
   number of positions of a chain. A separator between sequences matches nothing.

   Drafts follow SuffixDecoding (Oliaro et al. 2024): of all lengths of the match, the one wins
   whose continuation has the highest sum of probabilities, estimated from counts.

   Only Python's stable ABI is used, so that one library serves Python 3.11 and all newer ones. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SEPARATOR UINT32_MAX
#define MAX_ORDERS 4
#define FIRST_CAPACITY 256
#define MAX_CAPACITY (1u << 30)

typedef struct {
    uint64_t position; /* of the last token of the match */
    int length;        /* of the match */
} Candidate;

typedef struct {
    PyObject_HEAD
    uint32_t *tokens;   /* [capacity], a ring */
    uint32_t *previous; /* [num_orders, capacity]: low 32 bits of a position */
    uint32_t *heads;    /* [num_orders, capacity]: the same, by hash */
    Candidate *candidates; /* [num_orders * max_candidates] */
    uint32_t *following;   /* [num_orders * max_candidates]: scratch of a walk */
    int *alive;            /* the same */
    uint64_t begin, end;   /* valid positions; those before `begin` are overwritten or forgotten */
    uint64_t run;          /* tokens since the last separator, of those that were not forgotten */
    uint32_t capacity, max_capacity; /* powers of two */
    int capacity_bits;
    int num_orders, orders[MAX_ORDERS]; /* ascending */
    int depth, max_candidates;
    double factor, min_probability;
} Index;

static PyTypeObject *index_type; /* made once, when the module is imported */

static uint32_t token_at(const Index *self, uint64_t position) {
    return self->tokens[position & (self->capacity - 1)];
}

/* Hash of the `order` tokens that end at `position`, for a table of 2^bits entries. */
static uint32_t hash_gram(const Index *of, uint64_t position, int order, int bits) {
    uint64_t hash = 0;
    for (int i = 0; i < order; i++)
        hash = (hash ^ token_at(of, position - (uint64_t)i)) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(hash >> (64 - bits));
}

/* Enters `position`, the last of `run` tokens without a separator, into the chains. */
static void insert(Index *self, uint64_t position, uint64_t run) {
    const uint64_t mask = self->capacity - 1;
    for (int o = 0; o < self->num_orders && run >= (uint64_t)self->orders[o]; o++) {
        uint32_t *head = self->heads + (size_t)o * self->capacity +
                         hash_gram(self, position, self->orders[o], self->capacity_bits);
        self->previous[(size_t)o * self->capacity + (position & mask)] = *head;
        *head = (uint32_t)position;
    }
}

static void append(Index *self, uint32_t token) {
    self->tokens[self->end & (self->capacity - 1)] = token;
    self->end++;
    if (self->end - self->begin > self->capacity) self->begin = self->end - self->capacity;
    self->run = token == SEPARATOR ? 0 : self->run + 1;
    insert(self, self->end - 1, self->run); /* no order exceeds the capacity */
}

/* Makes room for `num_new` more tokens, as far as max_capacity allows. Returns 0, or -1 with an
   exception and the index unchanged. */
static int reserve(Index *self, uint64_t num_new) {
    uint64_t wanted = self->end - self->begin + num_new;
    if (wanted > self->max_capacity) wanted = self->max_capacity;
    if (wanted <= self->capacity) return 0;
    uint32_t capacity = self->capacity ? self->capacity : FIRST_CAPACITY;
    int bits = self->capacity ? self->capacity_bits : 8;
    while (capacity < wanted) capacity *= 2, bits++;
    const size_t num_entries = (size_t)self->num_orders * capacity;
    uint32_t *tokens = malloc(capacity * sizeof *tokens);
    uint32_t *previous = malloc(num_entries * sizeof *previous);
    uint32_t *heads = calloc(num_entries, sizeof *heads);
    if (tokens == NULL || previous == NULL || heads == NULL) {
        free(tokens), free(previous), free(heads);
        PyErr_NoMemory();
        return -1;
    }
    for (uint64_t p = self->begin; p < self->end; p++)
        tokens[p & (capacity - 1)] = token_at(self, p);
    free(self->tokens), free(self->previous), free(self->heads);
    self->tokens = tokens, self->previous = previous, self->heads = heads;
    self->capacity = capacity, self->capacity_bits = bits;
    uint64_t run = 0;
    for (uint64_t p = self->begin; p < self->end; p++) {
        run = token_at(self, p) == SEPARATOR ? 0 : run + 1;
        insert(self, p, run);
    }
    return 0;
}

/* Number of tokens before and at `position` that equal the last ones of `source`. */
static int match_length(const Index *self, uint64_t position, const Index *source) {
    uint64_t most = position - self->begin + 1;
    if (most > source->end - source->begin) most = source->end - source->begin;
    if (most > source->run) most = source->run;
    if (most > (uint64_t)self->depth) most = (uint64_t)self->depth;
    int length = 0;
    while (length < (int)most && token_at(self, position - (uint64_t)length) ==
                                     token_at(source, source->end - 1 - (uint64_t)length))
        length++;
    return length;
}

/* Appends to the `count` candidates the most recent positions whose match with the end of
   `source` is at least orders[o] and shorter than `ceiling`, longest match first, then most
   recent first. A position is followed by a token. Returns the new count. */
static int gather(Index *self, const Index *source, int o, int ceiling, int count) {
    const int order = self->orders[o], first = count;
    const uint64_t mask = self->capacity - 1, size = self->end - self->begin;
    const uint64_t source_size = source->end - source->begin;
    if (self->capacity == 0 || source->run < (uint64_t)order || source_size < (uint64_t)order)
        return count;
    const uint32_t *previous = self->previous + (size_t)o * self->capacity;
    uint32_t next = self == source
                        ? previous[(self->end - 1) & mask]
                        : self->heads[(size_t)o * self->capacity +
                                      hash_gram(source, source->end - 1, order,
                                                self->capacity_bits)];
    uint32_t distance = self == source; /* from the end; a chain leads away from it */
    for (int visits = 2 * self->max_candidates; visits > 0; visits--) {
        const uint32_t further = (uint32_t)self->end - next;
        if (further <= distance || further > size) break;
        distance = further;
        const uint64_t position = self->end - distance;
        next = previous[position & mask];
        if (distance == 1 || token_at(self, position + 1) == SEPARATOR) continue;
        const int length = match_length(self, position, source);
        if (length < order || length >= ceiling) continue;
        int at = count++;
        for (; at > first && self->candidates[at - 1].length < length; at--)
            self->candidates[at] = self->candidates[at - 1];
        self->candidates[at] = (Candidate){position, length};
        if (count - first == self->max_candidates) break;
    }
    return count;
}

/* Follows the most frequent tokens behind the first `count` candidates, the most recent among
   equals, while their probability is at least `least`. drafts, probabilities: written, at most
   `limit`. Returns their number; *score: the sum of the probabilities. */
static int walk(Index *self, int is_own, int count, int limit, double least, uint32_t *drafts,
                double *probabilities, double *score) {
    int num_alive = count, num_drafts = 0;
    double probability = 1.0;
    for (int i = 0; i < count; i++) self->alive[i] = i;
    *score = 0.0;
    while (num_drafts < limit) {
        for (int i = 0; i < num_alive; i++) {
            const uint64_t position =
                self->candidates[self->alive[i]].position + 1 + (uint64_t)num_drafts;
            /* Behind its own end a text that repeats itself goes on with the draft. */
            self->following[i] = position < self->end ? token_at(self, position)
                                 : is_own             ? drafts[position - self->end]
                                                      : SEPARATOR;
        }
        int most = 0;
        uint64_t newest = 0;
        uint32_t chosen = SEPARATOR;
        for (int i = 0; i < num_alive; i++) {
            const uint32_t token = self->following[i];
            if (token == SEPARATOR || token == chosen) continue;
            int same = 0;
            uint64_t last = 0;
            for (int j = 0; j < num_alive; j++) {
                if (self->following[j] != token) continue;
                const uint64_t position = self->candidates[self->alive[j]].position;
                same++;
                if (position > last) last = position;
            }
            if (same > most || (same == most && last > newest))
                most = same, newest = last, chosen = token;
        }
        if (most == 0) break;
        probability *= (double)most / num_alive;
        if (probability < least) break;
        int kept = 0;
        for (int i = 0; i < num_alive; i++)
            if (self->following[i] == chosen) self->alive[kept++] = self->alive[i];
        num_alive = kept;
        drafts[num_drafts] = chosen;
        probabilities[num_drafts++] = probability;
        *score += probability;
    }
    return num_drafts;
}

static int least_int(double a, int b) { return a < b ? (int)a : b; }

static PyObject *draft_tuple(int length, const uint32_t *drafts, const double *probabilities,
                             int count) {
    PyObject *ids = PyList_New(count), *values = PyList_New(count);
    for (int i = 0; ids != NULL && values != NULL && i < count; i++) {
        PyObject *id = PyLong_FromUnsignedLong(drafts[i]);
        PyObject *value = PyFloat_FromDouble(probabilities[i]);
        const int failed = id == NULL || value == NULL;
        PyList_SetItem(ids, i, id), PyList_SetItem(values, i, value);
        if (failed) Py_CLEAR(ids);
    }
    if (ids == NULL || values == NULL) {
        Py_XDECREF(ids), Py_XDECREF(values);
        return NULL;
    }
    return Py_BuildValue("iNN", length, ids, values);
}

#define MAX_DRAFT 256

static int read_source(PyObject *const *args, Py_ssize_t nargs, Index **source,
                       int *max_tokens) {
    if (nargs != 2 || !PyObject_TypeCheck(args[0], index_type)) {
        PyErr_SetString(PyExc_TypeError, "takes an index and max_tokens");
        return -1;
    }
    const long number = PyLong_AsLong(args[1]);
    if (number == -1 && PyErr_Occurred()) return -1;
    *source = (Index *)args[0];
    *max_tokens = number > MAX_DRAFT ? MAX_DRAFT : (int)number;
    return 0;
}

PyDoc_STRVAR(propose_doc,
             "propose(source, max_tokens)\n\n"
             "Return (length of the match, token ids, probabilities) of what followed the end of\n"
             "`source` here, or None. A probability is that of a token and all before it.");

static PyObject *index_propose(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Index *self = (Index *)object, *source;
    int max_tokens;
    if (read_source(args, nargs, &source, &max_tokens)) return NULL;
    const double factor = self->factor;
    uint32_t drafts[2][MAX_DRAFT];
    double probabilities[2][MAX_DRAFT], best_score = 0.0;
    int best = 0, best_count = 0, best_length = 0, count = 0, ceiling = self->depth + 1;
    for (int o = self->num_orders - 1; o >= 0; ceiling = self->orders[o--]) {
        /* A draft cannot have a higher sum than tokens. */
        if (least_int(factor * (ceiling - 1), max_tokens) <= best_score) break;
        const int first = count;
        count = gather(self, source, o, ceiling, count);
        for (int i = first; i < count; i++) {
            const int length = self->candidates[i].length;
            if (i + 1 < count && self->candidates[i + 1].length == length) continue;
            const int limit = least_int(factor * length, max_tokens);
            if (limit <= best_score) break;
            double score;
            const int num_drafts = walk(self, self == source, i + 1, limit,
                                        self->min_probability, drafts[1 - best], probabilities[1 - best], &score);
            if (score > best_score) {
                best = 1 - best;
                best_score = score, best_count = num_drafts, best_length = length;
            }
        }
    }
    if (best_count == 0) Py_RETURN_NONE;
    return draft_tuple(best_length, drafts[best], probabilities[best], best_count);
}

PyDoc_STRVAR(lookup_doc,
             "lookup(source, max_tokens)\n\n"
             "Return (length of the match, token ids, ones) of what followed the longest match\n"
             "with the end of `source`, the most recent of equally long ones, or None.");

static PyObject *index_lookup(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Index *self = (Index *)object, *source;
    int max_tokens;
    if (read_source(args, nargs, &source, &max_tokens)) return NULL;
    int count = 0;
    for (int o = self->num_orders - 1; o >= 0 && count == 0; o--)
        count = gather(self, source, o, self->depth + 1, 0);
    if (count == 0 || max_tokens < 1) Py_RETURN_NONE;
    const int length = self->candidates[0].length;
    uint32_t drafts[MAX_DRAFT];
    double probabilities[MAX_DRAFT], score;
    const int num_drafts =
        walk(self, self == source, 1, max_tokens, 0.0, drafts, probabilities, &score);
    return draft_tuple(length, drafts, probabilities, num_drafts);
}

PyDoc_STRVAR(extend_doc, "extend(token_ids, start, end)\n\nAppend token_ids[start:end].");

static PyObject *index_extend(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Index *self = (Index *)object;
    if (nargs != 3 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "takes a list and two numbers");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), end = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (start < 0) start = 0;
    if (end > PyList_Size(args[0])) end = PyList_Size(args[0]);
    if (end <= start) Py_RETURN_NONE;
    if (reserve(self, (uint64_t)(end - start))) return NULL;
    for (Py_ssize_t i = start; i < end; i++) {
        const unsigned long token = PyLong_AsUnsignedLong(PyList_GetItem(args[0], i));
        if (token >= SEPARATOR) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_OverflowError, "a token id is too large");
            return NULL;
        }
        append(self, (uint32_t)token);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(separate_doc, "separate()\n\nBegin another sequence.");

static PyObject *index_separate(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Index *self = (Index *)object;
    if (reserve(self, 1)) return NULL;
    append(self, SEPARATOR);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(forget_doc, "forget_before(position)\n\nForget tokens before this position.");

static PyObject *index_forget(PyObject *object, PyObject *argument) {
    Index *self = (Index *)object;
    const unsigned long long position = PyLong_AsUnsignedLongLong(argument);
    if (position == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    const uint64_t kept = position < self->end ? position : self->end;
    if (kept > self->begin) self->begin = kept;
    if (self->run > self->end - self->begin) self->run = self->end - self->begin;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reserve_doc,
             "reserve(num_tokens)\n\nMake room for this many more tokens, so that adding them in parts "
             "moves none.");

static PyObject *index_reserve(PyObject *object, PyObject *argument) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (number == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    if (reserve((Index *)object, number > MAX_CAPACITY ? MAX_CAPACITY : number) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"orders",     "depth",  "max_candidates",
                            "max_tokens", "factor", "min_probability", NULL};
    PyObject *orders;
    int depth = 64, max_candidates = 32;
    unsigned long long max_tokens = MAX_CAPACITY;
    double factor = 1.0, min_probability = 0.1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|iiKdd", names, &PyTuple_Type, &orders,
                                     &depth, &max_candidates, &max_tokens, &factor,
                                     &min_probability))
        return NULL;
    const Py_ssize_t num_orders = PyTuple_Size(orders);
    if (num_orders < 1 || num_orders > MAX_ORDERS || max_candidates < 1 ||
        max_candidates > (1 << 20) || max_tokens < 1 || depth > FIRST_CAPACITY) {
        PyErr_SetString(PyExc_ValueError, "a number is out of range");
        return NULL;
    }
    Index *self = (Index *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->num_orders = (int)num_orders;
    self->depth = depth, self->max_candidates = max_candidates;
    self->factor = factor, self->min_probability = min_probability;
    for (int o = 0; o < self->num_orders; o++) {
        const long order = PyLong_AsLong(PyTuple_GetItem(orders, o));
        if (PyErr_Occurred() || order < 1 || order > depth ||
            (o > 0 && order <= self->orders[o - 1])) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "orders must ascend to depth");
            Py_DECREF(self);
            return NULL;
        }
        self->orders[o] = (int)order;
    }
    self->max_capacity = FIRST_CAPACITY;
    while (self->max_capacity < max_tokens && self->max_capacity < MAX_CAPACITY)
        self->max_capacity *= 2;
    const size_t scratch = (size_t)num_orders * (size_t)max_candidates;
    self->candidates = malloc(scratch * sizeof *self->candidates);
    self->following = malloc(scratch * sizeof *self->following);
    self->alive = malloc(scratch * sizeof *self->alive);
    if (self->candidates == NULL || self->following == NULL || self->alive == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void index_dealloc(PyObject *object) {
    Index *self = (Index *)object;
    free(self->tokens), free(self->previous), free(self->heads);
    free(self->candidates), free(self->following), free(self->alive);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type); /* each object holds a reference to its type */
}

static PyObject *index_num_tokens(PyObject *object, void *Py_UNUSED(closure)) {
    const Index *self = (Index *)object;
    return PyLong_FromUnsignedLongLong(self->end - self->begin);
}

static PyObject *index_end(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(((Index *)object)->end);
}

static PyObject *index_num_bytes(PyObject *object, void *Py_UNUSED(closure)) {
    const Index *self = (Index *)object;
    const size_t scratch = (size_t)self->num_orders * (size_t)self->max_candidates;
    return PyLong_FromSize_t(
        sizeof *self + (1 + 2 * (size_t)self->num_orders) * self->capacity * sizeof(uint32_t) +
        scratch * (sizeof *self->candidates + sizeof *self->following + sizeof *self->alive));
}

static PyMethodDef index_methods[] = {
    {"propose", (PyCFunction)(void (*)(void))index_propose, METH_FASTCALL, propose_doc},
    {"lookup", (PyCFunction)(void (*)(void))index_lookup, METH_FASTCALL, lookup_doc},
    {"extend", (PyCFunction)(void (*)(void))index_extend, METH_FASTCALL, extend_doc},
    {"reserve", index_reserve, METH_O, reserve_doc},
    {"separate", index_separate, METH_NOARGS, separate_doc},
    {"forget_before", index_forget, METH_O, forget_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef index_attributes[] = {
    {"num_tokens", index_num_tokens, NULL, "Tokens and separators that it has.", NULL},
    {"end", index_end, NULL, "Position of the next token.", NULL},
    {"num_bytes", index_num_bytes, NULL, "Bytes of memory that it uses.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(index_doc,
             "SuffixIndex(orders, depth=64, max_candidates=32, max_tokens=2**30, factor=1.0,\n"
             "            min_probability=0.1)\n\n"
             "orders: lengths of the shortest matches to look for, ascending. depth: longest match\n"
             "that is told apart. max_candidates: occurrences to count, for each order.\n"
             "max_tokens: the ring's limit, rounded up to a power of two. factor: most tokens of a\n"
             "draft for each token of the match. min_probability: of each token of a draft.");

static PyType_Slot index_slots[] = {
    {Py_tp_doc, (void *)index_doc},
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_methods, index_methods},
    {Py_tp_getset, index_attributes},
    {0, NULL},
};

static PyType_Spec index_spec = {
    .name = "suffix_index.SuffixIndex",
    .basicsize = sizeof(Index),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = index_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "suffix_index", .m_size = -1};

PyMODINIT_FUNC PyInit_suffix_index(void) {
    if (index_type == NULL) index_type = (PyTypeObject *)PyType_FromSpec(&index_spec);
    if (index_type == NULL) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddObjectRef(made, "SuffixIndex", (PyObject *)index_type) < 0)
        Py_CLEAR(made);
    return made;
}
