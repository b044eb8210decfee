/* run.h - what generate and eval share: a checkpoint of any format, its tokenizer, a backend, a model and a session. */
#ifndef TSR_CLI_RUN_H
#define TSR_CLI_RUN_H

#include "cli/cli.h"
#include "convert/weights.h"
#include "model/model.h"
#include "model/tokenizer.h"

#include <jansson.h>

#define TSR_RUN_CHUNK 512
#define TSR_RUN_STOPS_MAX 64

/* Rows of both commands. */
#define TSR_RUN_OPTIONS                                                                                      \
    { "ids", 0, TSR_OPT_TEXT, "N,N,...", 0, 0, "Token ids instead of text." },                               \
        { "bos", 0, TSR_OPT_FLAG, NULL, 0, 0, "Begin with the model's begin token." },                       \
        { "context",                                                                                         \
          0,                                                                                                 \
          TSR_OPT_UINT,                                                                                      \
          "N",                                                                                               \
          1,                                                                                                 \
          (uint64_t)1 << 40,                                                                                 \
          "Positions to have room for, at most. The model's own context when not given." },                  \
        { "allow-longer", 0, TSR_OPT_FLAG, NULL, 0, 0, "Go beyond the context the model states." },          \
        { "backend",                                                                                         \
          0,                                                                                                 \
          TSR_OPT_TEXT,                                                                                      \
          "NAME",                                                                                            \
          0,                                                                                                 \
          0,                                                                                                 \
          "What computes: auto (the fastest this machine has, the default) or a name that tessera "          \
          "backends lists." },                                                                               \
        { "expert-cache",                                                                                    \
          0,                                                                                                 \
          TSR_OPT_SIZE,                                                                                      \
          "SIZE",                                                                                            \
          1,                                                                                                 \
          (uint64_t)1 << 50,                                                                                 \
          "Memory for routed experts, which are then read when they are chosen. All of them are in memory "  \
          "when not given." },                                                                               \
        { "cache-dtype",                                                                                     \
          0,                                                                                                 \
          TSR_OPT_CHOICE,                                                                                    \
          "f32|bf16",                                                                                        \
          0,                                                                                                 \
          0,                                                                                                 \
          "How the cache of full attention is kept. f32 when not given." },                                  \
        { "prefill-chunk",                                                                                   \
          0,                                                                                                 \
          TSR_OPT_UINT,                                                                                      \
          "N",                                                                                               \
          1,                                                                                                 \
          1u << 20,                                                                                          \
          "Given tokens to run at once. 512 when not given." },                                              \
        { "arch", 0, TSR_OPT_TEXT, "NAME", 0, 0, "Names of which model family. Found out when not given." }, \
    {                                                                                                        \
        "tie-head", 0, TSR_OPT_FLAG, NULL, 0, 0,                                                             \
            "Use the embedding as head where there is no head, although the configuration does not say so."  \
    }

typedef struct tsr_run {
    tsr_cli *cli;
    const tsr_args *args;
    const char *path;
    tsr_view view;
    tsr_spec *spec;
    tsr_tokenizer *tok; /* NULL: text cannot be taken: no tokenizer, and too few tokens for bytes */
    int32_t bos;        /* -1: none */
    int32_t ends[TSR_RUN_STOPS_MAX];
    size_t end_count;
    tsr_weight_source source;
    tsr_backend *backend;
    tsr_model *model;
    tsr_session *session;
} tsr_run;

/* Everything that can be refused by names, sizes and settings: opens source and tokenizer, reads no weights. Close r on
 * failure too. */
TSR_NODISCARD tsr_status tsr_run_open(tsr_run *r, tsr_cli *cli, const tsr_args *a, tsr_err *err);
/* Backend, weights, a session of `context` positions; forwards of up to max_tokens. Refuses beyond --mem-limit before it
 * reads anything. */
TSR_NODISCARD tsr_status tsr_run_load(tsr_run *r, int64_t context, int64_t max_tokens, tsr_err *err);
void tsr_run_close(tsr_run *r);

/* A file that travels with the weights. *out malloc'ed, ends with NUL; NULL when there is none. */
TSR_NODISCARD tsr_status tsr_run_asset(const tsr_run *r, const char *name, char **out, size_t *bytes,
                                       tsr_err *err);
/* --context and what the model states, without --allow-longer; INT64_MAX: no limit.
 * TSR_E_USAGE: --context is beyond the model's. */
TSR_NODISCARD tsr_status tsr_run_context(const tsr_run *r, int64_t *out, tsr_err *err);
/* The ids of --ids, each checked against the vocabulary. */
TSR_NODISCARD tsr_status tsr_run_ids(const tsr_run *r, tsr_tokens *out, tsr_err *err);
/* TSR_E_UNSUPPORTED where there is no tokenizer; warns when bytes are taken as tokens. */
TSR_NODISCARD tsr_status tsr_run_need_text(tsr_run *r, tsr_err *err);
/* --prefill-chunk, at most so many tokens as there are, at least one. */
int64_t tsr_run_chunk(const tsr_run *r, int64_t tokens);
/* A file, "-": standard input; malloc'ed. TSR_E_LIMIT beyond a gigabyte. */
TSR_NODISCARD tsr_status tsr_run_read_file(const char *path, char **out, size_t *bytes, tsr_err *err);
TSR_NODISCARD tsr_status tsr_tokens_push(tsr_tokens *t, int32_t id, tsr_err *err);
/* What ran: backend, threads, bytes of the plan; and the expert cache. */
void tsr_run_facts(const tsr_run *r, json_t **obj);
json_t *tsr_run_experts_json(const tsr_experts_stats *e, int64_t tokens);

#endif
