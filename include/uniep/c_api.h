/* The library as C functions, for other languages: groups, layers, and one call a direction. Plain
 * C, and part of libuniep; uniep.h does not include it.
 *
 * Every function that returns int returns 0, or 1 + the number of the ErrorCode of uniep/error.h
 * (1 an argument was refused, 2 unsupported, 3 capacity, 4 a wait expired, 5 another rank failed,
 * 6 the device, 7 a file, 8 internal), and `uniep_last_error` then has the sentence. Structures
 * begin as zeros, and fields that are not set keep the meaning of zero. What is marked collective
 * is called by all ranks of the group in the same order; uniep/layer.h says what happens when one
 * of them refuses, and which errors of a GPU come later. */
#ifndef UNIEP_C_API_H_
#define UNIEP_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(UNIEP_SHARED) && defined(__GNUC__)
#define UNIEP_C_API __attribute__((visibility("default")))
#else
#define UNIEP_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* One rank's membership in a group, and one layer on one rank: memory and counters for layers of
 * one shape, no weights. Both are used from one thread at a time. */
typedef struct uniep_group uniep_group;
typedef struct uniep_layer uniep_layer;

/* Memory of one rank for what forward passes save, shared by layers of one shape; and what one
 * forward pass of a layer with such a pool saved. */
typedef struct uniep_row_pool uniep_row_pool;
typedef struct uniep_saved uniep_saved;

UNIEP_C_API const char* uniep_version(void);

/* The sentence of this thread's last call that failed; "" where none did. Valid until this thread's
 * next call. */
UNIEP_C_API const char* uniep_last_error(void);

/* 1: this build has the CUDA backend. */
UNIEP_C_API int uniep_has_cuda(void);

/* ---- groups ---- */

typedef struct {
  int32_t rank, size;
  int32_t backend;      /* 0: CPU, 1: CUDA */
  int32_t device;       /* the CUDA device of this rank; no meaning on the CPU */
  int32_t share_device; /* 1: several ranks may use one GPU; for tests, slow */
  int32_t timeout_ms;   /* limit of every wait of the set-up; 0: UNIEP_TIMEOUT_MS, else 30000 */
  /* Collective among the group's processes: every rank passes the same number of bytes; `all`
   * receives size times as many, rank after rank. 0: it worked. Called from this thread alone, and
   * only while uniep_group_create or _find_hosts runs. Not needed where size is 1. */
  int (*all_gather)(void* context, const void* own, size_t bytes, void* all);
  void* context;
  /* In brackets behind each sentence of an error of the group, its layers and pools that names a
   * rank: such as which ranks of a larger group these are. NULL: nothing. */
  const char* ranks_note;
} uniep_group_config;

/* Collective. With CUDA the members are processes of one host; on the CPU they may be on several,
 * with as many consecutive ranks on each. */
UNIEP_C_API int uniep_group_create(const uniep_group_config* config, uniep_group** group);

/* Collective; makes nothing: on how many hosts the ranks of such a group are, and how many each
 * has. All ranks refuse hosts that are unequal, or whose ranks do not come one after another. */
UNIEP_C_API int uniep_group_find_hosts(const uniep_group_config* config, int32_t* hosts,
                                       int32_t* local_ranks);

/* On how many hosts the ranks are, and how many each has: host 0 has the first, and so on. */
UNIEP_C_API int uniep_group_layout(const uniep_group* group, int32_t* hosts, int32_t* local_ranks);

/* Layers of the group keep what they need of it. NULL is accepted. */
UNIEP_C_API void uniep_group_destroy(uniep_group* group);

/* ---- layers and their memory ---- */

/* See Problem in uniep/problem.h. */
typedef struct {
  int64_t hidden, intermediate, num_experts, topk, max_tokens;
  int64_t capacity_rows; /* 0: the default */
  int64_t row_align;     /* 0: the default, 128 */
  int64_t save; /* what forward keeps of x: 0 rows, 1 tokens (each that came, once), 2 nothing */
  int64_t recompute_h;    /* 1: forward does not keep h, backward computes it again */
  int64_t activation;     /* 0 swiglu, 1 geglu, 2 geglu_tanh, 3 reglu, 4 gpt_oss, 5 swiglu_clamped,
                           * 6 swiglu_softcapped; without a gate, so that w1 has I rows: 7 relu2,
                           * 8 gelu, 9 silu */
  int64_t probs;          /* where probabilities enter: 0 before fc2, 1 after it */
  int64_t bias;           /* 1: experts have biases */
  int64_t backward_rows;  /* rows that backward has room for at a time; 0: all */
  int64_t combine_groups; /* 0: the default, 1 */
  int64_t combine_partials; /* what groups' sums are before they are added up: 0 fp32, 1 bf16 */
  int64_t shared_experts;   /* S: experts that every rank has and every token goes to */
  int64_t no_shared_gate;   /* 1: shared_probs are never given; backward can then take less time */
  int64_t slot_rows;        /* 1: out and dx have a row for each slot, not added up */
  int64_t gathered_hosts;   /* 0: the default, 1; more: of so many hosts, a block of tokens each */
  int64_t first_host;       /* of more: they come in waves from this host on; -1: all are there */
} uniep_problem;

/* Memory of a layer and of its calls. Each block, and each of the tensors x_rows, h and row_probs,
 * begins at a multiple of `alignment`. */
typedef struct {
  int64_t rows;            /* of h and row_probs */
  int64_t rows_of_x;       /* of x_rows: what forward keeps of x, rows or tokens */
  int64_t symmetric;       /* bytes of a layer that peers reach */
  int64_t workspace;       /* bytes of a layer for this rank alone */
  int64_t plan;            /* bytes of one routing plan */
  int64_t forward_memory;  /* bytes that a forward pass works in */
  int64_t backward_memory; /* likewise, a backward pass; from its part data to its part weights */
  int64_t alignment;       /* in bytes */
} uniep_memory_needs;

/* What layers of this problem need, of a group of `ranks` on one host and on `backend`; of calls,
 * for as many rows as there is capacity for. */
UNIEP_C_API int uniep_needs(const uniep_problem* problem, int32_t backend, int32_t ranks,
                            uniep_memory_needs* needs);

/* `bytes` of the pool, or 0 for half of the memory that is free now. `memory`: so many bytes of the
 * caller's at a multiple of needs.alignment, until the pool and all layers and saved that use it
 * are destroyed; or NULL, and uniep allocates. `problem`: as of the layers, whose hidden,
 * intermediate, row_align, save, recompute_h and whether there is a gate count. Not collective; see
 * uniep/row_pool.h. */
UNIEP_C_API int uniep_row_pool_create(uniep_group* group, const uniep_problem* problem,
                                      int64_t bytes, void* memory, uniep_row_pool** pool);

/* Layers and saved keep what they need of it. NULL is accepted. */
UNIEP_C_API void uniep_row_pool_destroy(uniep_row_pool* pool);

typedef struct {
  int64_t pages;
  int64_t page_bytes;        /* of one page, which has row_align rows */
  int64_t bytes;             /* of all of it */
  int64_t free_pages;        /* of a GPU's pool: waits for the device, as the next does */
  int64_t fewest_free_pages; /* since it was made */
} uniep_row_pool_state;

UNIEP_C_API int uniep_row_pool_ask(uniep_row_pool* pool, uniep_row_pool_state* state);

typedef struct {
  int32_t timeout_ms;      /* limit of every wait; 0: UNIEP_TIMEOUT_MS, else 30000 */
  int32_t record_timeline; /* 1: keep an event per task, in memory of uniep's own */
  const char* schedule;    /* of both directions, as PRESET,key=value,...; NULL: looked up */
  void* workspace;         /* needs.workspace bytes; NULL: uniep allocates */
  void* symmetric;         /* needs.symmetric bytes of this rank; NULL: uniep allocates */
  /* Every rank's symmetric memory as mapped here, by rank, `symmetric` itself among them. NULL:
   * uniep maps `symmetric` into the other ranks (CUDA), or the group is this rank alone. */
  void* const* peers;
  /* Called once, when nobody reaches `symmetric` through this layer any more; NULL: the caller
   * knows. */
  void (*release)(void* context);
  void* release_context;
  uniep_row_pool* row_pool; /* where forward saves; NULL: in memory of each call */
  /* The erf of geglu and gelu on a GPU, the same on all ranks: 1: that of CUDA 13.2 and newer, 0:
   * an older one, which has other last bits. PyTorch has that of the CUDA it was built with. */
  int32_t erf_since_13_2;
} uniep_layer_config;

/* Collective. What is given as memory stays the layer's, whose contents nobody else changes, until
 * the layer is destroyed; for `symmetric`, until `release`. `config` may be NULL. */
UNIEP_C_API int uniep_layer_create(uniep_group* group, const uniep_problem* problem,
                                   const uniep_layer_config* config, uniep_layer** layer);

/* What the layer and its calls need with `rows` rows: a multiple of row_align up to the capacity,
 * or 0 for the capacity. */
UNIEP_C_API int uniep_layer_needs(uniep_layer* layer, int64_t rows, uniep_memory_needs* needs);

/* NULL is accepted. */
UNIEP_C_API void uniep_layer_destroy(uniep_layer* layer);

/* The schedule of calls that name none: every axis as text, with its final zero. `pass` is 0 for
 * forward, 1 for backward. */
UNIEP_C_API int uniep_layer_schedule(uniep_layer* layer, int32_t pass, char* text, size_t size);

/* Waits until all that the layer was asked for is done; fails with what failed on the way. */
UNIEP_C_API int uniep_layer_synchronize(uniep_layer* layer);

/* ---- calls ----
 *
 * T tokens of this rank (`tokens`, 0 to max_tokens), H hidden, I intermediate, K topk, El = E /
 * ranks local experts. Tensors are contiguous, and lie in device memory with the CUDA backend,
 * where those of rows and weights begin at multiples of 16 bytes. Memory that a call is given (the
 * plan's, the rows') may be uninitialised where the call writes it.
 *
 * `stream` is the cudaStream_t of the call's launches. Where calls of a layer follow one another on
 * different streams, the layer makes the later wait for the earlier, but not across the begin or
 * end of a graph capture, nor for replays of graphs: these the caller orders. A stream lives until
 * the layer's next call on another one, and until it has run. */

/* Why a routing does not fit, as uniep/overflow.h has it: [0] of uniep_forward_call's overflow. */
enum {
  UNIEP_OVERFLOW_NONE = 0,
  UNIEP_OVERFLOW_ROWS = 1,
  UNIEP_OVERFLOW_IMPOSSIBLE = 2,
  UNIEP_OVERFLOW_PAGES = 3,
  UNIEP_OVERFLOW_EXPERT_ROWS = 4
};

/* Memory that has rows, of one forward pass. */
typedef struct {
  void* x_rows; /* bf16 [rows, H]; written; NULL with save 2 */
  void* h;      /* bf16 [rows, 2I], or [rows, I] without a gate; written; NULL with recompute_h */
  float* row_probs;     /* fp32 [rows]; written */
  void* forward_memory; /* forward_memory bytes, of no use behind the call; NULL: uniep's own */
} uniep_row_memory;

/* See Layer, "Tokens that come in waves", in uniep/layer.h. Of each wave of the pass a cudaEvent_t
 * or NULL; zero: no events. One of the arrays may be NULL. */
typedef struct {
  void* const* before; /* [count]: the wave's tokens are there when this is */
  void* const* after;  /* [count]: recorded when all that the wave writes is there */
  int32_t count;       /* in backward gathered_hosts, in forward one more, of 3 hosts or more two */
} uniep_wave_events;

typedef struct {
  int64_t tokens;
  const int32_t* topk_ids; /* [T, K], -1: dropped */
  const float* topk_probs; /* [T, K] */
  const void* x;           /* bf16 [T, H] */
  const void* w1; /* bf16 [El, 2I, H]: gate rows, then up rows; without a gate [El, I, H] */
  const void* w2; /* bf16 [El, H, I] */
  void* out;      /* bf16 [T, H]; with slot_rows [T, K, H], as dx */
  void* plan;     /* needs.plan bytes; written */
  uniep_row_memory memory; /* of as many rows as there is capacity for; not read with `allocate` */
  /* NULL, or: waits for the device until the routing is planned, then asks for memory of the rows
   * that came, padding included, as `needs` says: its rows, rows_of_x and forward_memory. Its
   * `rows` goes to uniep_backward_call as it is. 0 means that it worked. Not in a graph capture. */
  int (*allocate)(void* context, const uniep_memory_needs* needs, uniep_row_memory* memory);
  void* allocate_context;
  /* NULL: a routing with an impossible id, or with more rows for a rank than needs.rows, is an
   * error on all ranks (CUDA: of a later call). Else [2], where the tensors lie, and no call fails
   * for it, with the same numbers on all ranks: [0] UNIEP_OVERFLOW_NONE where it fits, and [1] the
   * rows, padding included, of the rank that receives most; else [0] why it does not, and [1] what
   * would do. Then out is filled with NaN, and backward of this plan, which says ignore_overflow,
   * fills dx with NaN, dprobs with 0 and weight gradients that are overwritten with 0; those that
   * are added to keep their values. */
  int64_t* overflow;
  const char* schedule; /* NULL: the layer's */
  void* stream;
  /* What the pass saved, to be destroyed, if the layer has a row pool: plan, x_rows, h, row_probs
   * and allocate are NULL then. Without a pool: NULL. */
  uniep_saved** saved;
  const void* b1;            /* bf16 [El, 2I], with bias 1; else NULL, as the next */
  const void* b2;            /* bf16 [El, H] */
  const void* shared_w1;     /* bf16 [S, 2I, H], as w1; NULL without shared experts, as the next */
  const void* shared_w2;     /* bf16 [S, H, I] */
  const float* shared_probs; /* [T, S]; NULL: each is 1 */
  /* Weights that lie otherwise, and are read where they are; each zero or NULL: as w1 and w2 say.
   */
  int32_t interleaved; /* 1: rows of gate and up of w1 take turns, the gate's first */
  int32_t in_out;      /* 1: each matrix of w1 and w2 is [in, out]: [El, H, 2I], columns of gate and
                        * up for rows; [El, I, H]. On the CUDA backend not interleaved, and with
                        * w3 only where 64 divides I */
  const void* w3;      /* bf16 [El, I, H], that of up; w1 is the gate's [El, I, H] */
  /* [El]: a tensor for each expert, [2I, H] or [H, I]; w1 or w2 is NULL */
  const void* const* w1_each;
  const void* const* w2_each;
  uniep_wave_events waves; /* of a problem with first_host, on GPUs */
} uniep_forward_call;

/* Collective: plans the routing and runs the forward pass. Of plan, x_rows, h and row_probs a
 * backward needs the contents, which may be moved: each to any address, on any stream. */
UNIEP_C_API int uniep_forward(uniep_layer* layer, const uniep_forward_call* call);

/* Gives pages back that no backward has given back, now or with the next call of a layer of the
 * pool. From any thread, not during a call on it. NULL is accepted. */
UNIEP_C_API void uniep_saved_destroy(uniep_saved* saved);

typedef struct {
  int64_t rows;        /* those of forward; 0: the capacity */
  int32_t part;        /* 0: whole; 1: data (dx, dprobs); 2: weights (dw1, dw2), not collective */
  int32_t weight_grad; /* 0: bf16, overwritten; 1: fp32, added to; 2: bf16, added to */
  int64_t tokens;
  const void* plan; /* as forward left it; so the next three */
  const void* x_rows;
  const void* h;
  const float* row_probs;
  const void* dy; /* bf16 [T, H]; parts 0 and 1, like the next four, and with shared experts 2 */
  const void* w1; /* as in forward */
  const void* w2;
  void* dx;                /* bf16 [T, H], or [T, K, H]; with shared experts apart from dy and x */
  float* dprobs;           /* fp32 [T, K]; 0 at dropped slots */
  void* dw1;               /* as w1; parts 0 and 2 */
  void* dw2;               /* as w2; parts 0 and 2 */
  void* backward_memory;   /* backward_memory bytes: part 1 writes, part 2 reads; part 0 leaves
                            * nothing of use there, and may be given NULL: uniep's own */
  int32_t ignore_overflow; /* 1: forward was given `overflow` */
  const void* x;           /* bf16 [T, H] as in forward: with save 2 in parts 0 and 1, with shared
                            * experts in all parts; else NULL */
  const char* schedule;    /* NULL: the layer's */
  void* stream;
  /* What forward gave, if the layer has a row pool: then rows is 0, and plan, x_rows, h and
   * row_probs are NULL. Part 2 is given the backward_memory of the part 1 whose weight gradients it
   * computes; NULL: those of the last one on this `saved`. */
  uniep_saved* saved;
  int32_t keep_pages; /* 1: `saved` keeps its pages for another backward; else the part that reads
                       * them last gives them back */
  const void* b1;     /* as in forward; parts 0 and 1 */
  const void* b2;
  void* db1; /* as b1, of the type that weight_grad says; parts 0 and 2; NULL without biases */
  void* db2; /* as b2 */
  const void* shared_w1; /* as in forward; parts 0 and 1, like the next two */
  const void* shared_w2;
  float* dshared_probs; /* fp32 [T, S]; NULL: not wanted */
  /* Gradients of the type that weight_grad says, of this rank's tokens alone; parts 0 and 2. */
  void* dshared_w1;
  void* dshared_w2;
  /* As in forward; of gradients those with a d. Each may lie in its own way. */
  int32_t interleaved;    /* 1: of w1 */
  int32_t dw_interleaved; /* 1: of dw1 */
  int32_t in_out;         /* 1: of w1 and w2 */
  int32_t dw_in_out;      /* 1: of dw1 and dw2 */
  const void* w3;
  const void* const* w1_each;
  const void* const* w2_each;
  void* dw3;
  void* const* dw1_each;
  void* const* dw2_each;
  uniep_wave_events waves; /* as in forward; parts 0 and 1 */
} uniep_backward_call;

/* Collective, but for part 2. */
UNIEP_C_API int uniep_backward(uniep_layer* layer, const uniep_backward_call* call);

/* ---- rows that are added up elsewhere ---- */

/* Rows of slots, as a layer with slot_rows leaves them, wherever they have come to lie: out[t] is
 * the sum that a layer without it has, of the same bits. */
typedef struct {
  int32_t backend; /* 0 cpu, 1 cuda */
  int32_t device;  /* with cuda the one where all of it lies; there rows begin at multiples of 16
                    * bytes */
  int64_t tokens, hidden, topk; /* T, H, K */
  int64_t num_experts, combine_groups;
  int64_t combine_partials; /* as in uniep_problem */
  const int32_t* ids;       /* [T, K], numbers of experts, less than num_experts (which on GPUs is
                             * not looked at); less than 0: the slot is left out */
  const float* factors;     /* [T, K], what rows are multiplied by; NULL: nothing */
  const int64_t* row;       /* [T, K], which of `rows`, and behind them of `more`; the sum of one
                             * that is none is NaN */
  const void* rows;         /* bf16 [num_rows, H] */
  const void* more;         /* bf16 [num_more, H] */
  int64_t num_rows, num_more;
  void* out;    /* bf16 [T, H], which overlaps none of these */
  void* stream; /* cudaStream_t */
} uniep_rows_call;

/* Not collective, and of no layer. */
UNIEP_C_API int uniep_add_rows(const uniep_rows_call* call);

/* ---- the search for a schedule ----
 *
 * Both measure many schedules on the tensors of a call, which they run a few hundred times, and say
 * which is fastest: uniep/tune.h says what they do to the tensors, and docs/tuning.md how they
 * search. What is found is stored, and taken by layers that are made later. */

typedef struct {
  double budget_s;     /* seconds, 0.1 to 86400; 0: 60 */
  int32_t candidates;  /* schedules besides the default and the presets, 1 to 1000; 0: 16 */
  int32_t max_rounds;  /* 1 to 10000; 0: 200 */
  const char* space;   /* "axis=value|value,..."; NULL: all */
  const char* profile; /* "none", or a shipped one's name; NULL: that of the device, if any */
  int32_t not_stored;  /* 1: the result is not kept */
  const char* cache;   /* file to keep it in; NULL: the user's (UNIEP_TUNE_CACHE) */
  int (*stop)(void* context); /* asked on rank 0 between passes: not 0 ends the search; or NULL */
  void* stop_context;
} uniep_tune_config;

typedef struct {
  char schedule[1024]; /* the fastest, every axis; the default's where none is faster by more than
                        * chance */
  double seconds, default_seconds; /* of a pass, medians; 0: it ended before there was one */
  double speedup;                  /* over the default */
  int32_t faster;                  /* than the default, by more than chance */
  int32_t decided; /* nothing that is left could be faster by more than half a percent */
  int32_t stopped; /* by `stop` */
  int32_t stored;
  int32_t rounds;     /* that are complete */
  int32_t candidates; /* that were measured */
  int32_t rejected;   /* of these, for wrong bits */
  char why[1024];     /* what sets it apart from the default; may be cut off, like the next */
  char problem[1024]; /* why it could not be stored, or what of the cache cannot be used */
} uniep_tune_result;

/* Collective. `call` as for uniep_forward; its `schedule` is not read. `config` may be NULL. */
UNIEP_C_API int uniep_tune_forward(uniep_layer* layer, const uniep_forward_call* call,
                                   const uniep_tune_config* config, uniep_tune_result* result);

/* Collective. `call` as for a whole uniep_backward. */
UNIEP_C_API int uniep_tune_backward(uniep_layer* layer, const uniep_backward_call* call,
                                    const uniep_tune_config* config, uniep_tune_result* result);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* UNIEP_C_API_H_ */
