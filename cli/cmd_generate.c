/* cmd_generate.c - tessera generate: text from a model. */
#include "cli/out.h"
#include "cli/run.h"
#include "model/generate.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const synopsis[] = { "[OPTION]... CKPT --prompt TEXT",
                                        "[OPTION]... CKPT --prompt-file FILE", "[OPTION]... CKPT -",
                                        "[OPTION]... CKPT --ids N,N,...", NULL };
static const char *const description[] = {
    "Runs the model of a checkpoint and prints what it goes on with, as it is made. CKPT may have any format "
    "that is read: "
    "a Tessera checkpoint, a run folder, a tar, a safetensors folder. The tokenizer is the one that travels "
    "with the "
    "weights (tiktoken.model, tokenizer_config.json); without it, bytes are taken as tokens.",
    "Text is taken as it is: what looks like a special token is ordinary text, and no begin token is put in "
    "front (--bos "
    "does). An empty prompt stands for the begin token. With --chat the text is a message of a user, in Kimi "
    "K3's format.",
    "Without --temperature the most probable token is taken. Otherwise temperature, --top-k, --top-p and "
    "--min-p apply "
    "in this order, and the same seed gives the same text, whatever the number of threads. It ends at the "
    "model's end "
    "tokens, at a --stop text, after --max-tokens, or when the context is full.",
    NULL,
};
static const tsr_opt options[] = {
    { "prompt", 'p', TSR_OPT_STRING, "TEXT", 0, 0, "What to go on from." },
    { "prompt-file", 'f', TSR_OPT_TEXT, "FILE", 0, 0,
      "The same, read from a file, to its last byte; - is standard input." },
    { "chat", 0, TSR_OPT_FLAG, NULL, 0, 0, "The prompt is a message of a user; prints the answer." },
    { "think", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "With --chat: thoughts first; they and the answer stand between the model's markers." },
    { "max-tokens", 'n', TSR_OPT_UINT, "N", 0, 1u << 30,
      "Tokens to make, at most. 256 when not given; 0: only run the prompt." },
    { "temperature", 't', TSR_OPT_REAL, "X", 0, 1000,
      "Divides the logits. 0, the default: the most probable token." },
    { "top-k", 0, TSR_OPT_UINT, "N", 0, 1u << 30, "Draw from the N most probable tokens; 0: from all." },
    { "top-p", 0, TSR_OPT_REAL, "X", 0, 1,
      "Draw from the fewest most probable tokens that have probability X together." },
    { "min-p", 0, TSR_OPT_REAL, "X", 0, 1,
      "Draw from tokens at least X times as probable as the most probable one." },
    { "seed", 0, TSR_OPT_UINT, "N", 0, UINT64_MAX, "Of the random numbers. 0 when not given." },
    { "stop", 0, TSR_OPT_LIST, "TEXT", 0, 0, "End in front of this text. May be given several times." },
    { "ignore-eos", 0, TSR_OPT_FLAG, NULL, 0, 0, "Go on behind the model's end tokens." },
    { "raw-bytes", 0, TSR_OPT_FLAG, NULL, 0, 0,
      "Print the tokens' bytes as they are, special tokens too, valid text or not." },
    { "logprobs", 0, TSR_OPT_UINT, "N", 0, 1000,
      "With --json: log probabilities of the tokens made and of the N most probable." },
    { "stats", 0, TSR_OPT_FLAG, NULL, 0, 0, "Print times and what the expert cache did on standard error." },
    { "save-state", 0, TSR_OPT_TEXT, "DIR", 0, 0,
      "Keep the state after everything given and made, as a checkpoint." },
    { "load-state", 0, TSR_OPT_TEXT, "DIR", 0, 0,
      "Go on from such a state: what it has seen is not run again." },
    TSR_RUN_OPTIONS,
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera generate model.tsr --prompt 'Once upon a time' --temperature 1 --top-p 0.95 --seed 7",
      "A story." },
    { "tessera generate model/ --chat --prompt 'What is a monad?' --expert-cache 48GiB",
      "Experts are read when they are chosen." },
    { "tessera generate model.tsr -f book.txt -n 0 --save-state book.state", "Reads a long text once ..." },
    { "tessera generate model.tsr --load-state book.state --prompt 'In short:'",
      "... and asks about it as often as wanted." },
    { 0 },
};
static const char *const see_also[] = { "eval", "backends", "info", NULL };

#define DEFAULT_TOKENS 256

typedef struct job {
    tsr_run r;
    tsr_cli *cli;
    const tsr_args *a;
    tsr_tokens before; /* what a loaded state has seen */
    bool before_known;
    int64_t before_count;
    tsr_tokens prompt, made;
    tsr_sampler *sampler;
    tsr_generate_result result;
    tsr_bytes text;     /* --json */
    json_t *logprobs;   /* --logprobs */
    tsr_candidate *top; /* [top_count] */
    int64_t top_count;
    bool harmless; /* control bytes must not reach the terminal */
} job;

/* ---- the prompt ---------------------------------------------------------------------------------------------- */

static tsr_status check_choices(const job *j, tsr_err *err)
{
    const tsr_args *a = j->a;
    bool text = tsr_opt_given(a, "prompt"), file = tsr_opt_given(a, "prompt-file"),
         ids = tsr_opt_given(a, "ids"), chat = tsr_opt_given(a, "chat"), dash = a->operand_count > 1;
    if (dash && strcmp(a->operands[1], "-") != 0) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "%s: is one operand too many (the prompt is --prompt TEXT, or - for standard input)",
                 a->operands[1]);
    }
    if (text + file + ids + dash != 1) {
        TSR_FAIL(err, TSR_E_USAGE, "generate: needs %s of --prompt, --prompt-file, --ids and -",
                 text + file + ids + dash == 0 ? "one" : "only one");
    }
    if (chat && ids) {
        TSR_FAIL(err, TSR_E_USAGE, "--chat: goes with text, not with --ids");
    }
    if (tsr_opt_given(a, "think") && !chat) {
        TSR_FAIL(err, TSR_E_USAGE, "--think: goes with --chat");
    }
    if (tsr_opt_given(a, "logprobs") && !j->cli->json) {
        TSR_FAIL(err, TSR_E_USAGE, "--logprobs: goes with --json");
    }
    if (tsr_opt_given(a, "raw-bytes") && (j->cli->json || isatty(STDOUT_FILENO))) {
        TSR_FAIL(err, TSR_E_USAGE,
                 j->cli->json ? "--raw-bytes: does not go with --json"
                              : "standard output: is a terminal (redirect it, or leave out --raw-bytes)");
    }
    return TSR_OK;
}

static tsr_status encode(job *j, const char *text, size_t bytes, tsr_err *err)
{
    TSR_TRY(tsr_run_need_text(&j->r, err));
    if (!tsr_opt_given(j->a, "chat")) {
        return tsr_tokenizer_encode(j->r.tok, text, bytes, 0, &j->prompt, err);
    }
    tsr_chat_message user = { .role = TSR_ROLE_USER, .text = { text, bytes } };
    tsr_chat chat = {
        .messages = &user, .count = 1, .thinking = tsr_opt_given(j->a, "think"), .generate = true
    };
    return tsr_chat_encode(j->r.tok, &chat, &j->prompt, err);
}

static tsr_status take_prompt(job *j, tsr_err *err)
{
    const tsr_args *a = j->a;
    const char *text = tsr_opt_text(a, "prompt", NULL);
    char *read = NULL;
    size_t bytes = text != NULL ? strlen(text) : 0;
    if (tsr_opt_given(a, "bos")) {
        if (j->r.bos < 0) {
            TSR_FAIL(err, TSR_E_USAGE, "--bos: %s names no begin token", j->r.path);
        }
        TSR_TRY(tsr_tokens_push(&j->prompt, j->r.bos, err));
    }
    if (tsr_opt_given(a, "ids")) {
        return tsr_run_ids(&j->r, &j->prompt, err);
    }
    if (text == NULL) {
        TSR_TRY(tsr_run_read_file(tsr_opt_text(a, "prompt-file", "-"), &read, &bytes, err));
    }
    tsr_status st = encode(j, text != NULL ? text : read, bytes, err);
    free(read);
    TSR_TRY(st);
    if (j->prompt.count > 0) {
        return TSR_OK;
    }
    if (tsr_opt_given(a, "load-state")) {
        TSR_FAIL(err, TSR_E_USAGE, "the prompt is empty (a loaded state needs something to go on with)");
    }
    if (j->r.bos < 0) {
        TSR_FAIL(err, TSR_E_USAGE, "the prompt is empty, and %s names no begin token to start from",
                 j->r.path);
    }
    return tsr_tokens_push(&j->prompt, j->r.bos, err);
}

/* ---- how long it may become -------------------------------------------------------------------------------------- */

/* Positions of a saved state, from its note; damage shows when it is loaded. */
static tsr_status peek_state(job *j, const char *path, tsr_err *err)
{
    tsr_ckpt *c;
    char *text;
    size_t bytes;
    TSR_TRY(tsr_ckpt_open(&c, path, err));
    tsr_status st = tsr_ckpt_read_member(c, "train.json", (size_t)1 << 20, &text, &bytes, err);
    tsr_ckpt_close(&c);
    if (st != TSR_OK) {
        return st == TSR_E_MISSING ? TSR_ERR(err, TSR_E_FORMAT, "%s: is not the state of a session", path)
                                   : st;
    }
    json_t *note = json_loadb(text, bytes, 0, NULL);
    j->before_count = json_integer_value(json_object_get(note, "positions"));
    json_decref(note);
    free(text);
    if (j->before_count < 0 || j->before_count > (int64_t)1 << 40) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is not the state of a session", path);
    }
    return TSR_OK;
}

static tsr_status context_of(job *j, int64_t max_tokens, int64_t *out, tsr_err *err)
{
    int64_t limit, given = j->before_count + (int64_t)j->prompt.count;
    TSR_TRY(tsr_run_context(&j->r, &limit, err));
    if (given > limit) {
        bool own = tsr_opt_given(j->a, "context");
        TSR_FAIL(err, TSR_E_USAGE, "the prompt has %lld tokens%s, the %s %lld (%s)", (long long)given,
                 j->before_count > 0 ? " with those of the state" : "",
                 own ? "context asked for" : "model's context", (long long)limit,
                 own ? "raise --context" : "--allow-longer goes beyond it");
    }
    *out = given + max_tokens < limit ? given + max_tokens : limit;
    return TSR_OK;
}

/* ---- giving out ---------------------------------------------------------------------------------------------------- */

/* New lines and tabs pass; what could steer a terminal is shown as \xNN. */
static void put_harmless(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f) {
            (void)printf("\\x%02x", c);
        } else {
            (void)putchar(c); /* failures show when it is flushed */
        }
    }
}

static tsr_status keep_text(job *j, tsr_span t, tsr_err *err)
{
    if (j->text.room < j->text.count + t.bytes) {
        size_t room = j->text.room * 2 + t.bytes + 256;
        char *grown = realloc(j->text.p, room);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        j->text.p = grown;
        j->text.room = room;
    }
    if (t.bytes > 0) {
        memcpy(j->text.p + j->text.count, t.p, t.bytes);
    }
    j->text.count += t.bytes;
    return TSR_OK;
}

static json_t *candidate_json(const tsr_candidate *c)
{
    json_t *o = json_object();
    tsr_json_set(&o, "id", json_integer(c->id));
    tsr_json_set(&o, "logprob", tsr_json_number(c->logprob));
    return o;
}

static void keep_logprobs(job *j, const tsr_generated *g)
{
    tsr_candidate chosen = { .id = g->id };
    tsr_sampler_logprobs(j->sampler, g->logits, &chosen, j->top, j->top_count);
    json_t *o = candidate_json(&chosen), *top = json_array();
    for (int64_t i = 0; i < j->top_count; i++) {
        tsr_json_append(&top, candidate_json(&j->top[i]));
    }
    tsr_json_set(&o, "top", top);
    tsr_json_append(&j->logprobs, o);
}

static tsr_status on_token(void *payload, const tsr_generated *g, bool *stop, tsr_err *err)
{
    job *j = payload;
    (void)stop;
    if (g->id >= 0) {
        TSR_TRY(tsr_tokens_push(&j->made, g->id, err));
    }
    if (j->cli->json) {
        if (g->id >= 0 && j->logprobs != NULL) {
            keep_logprobs(j, g);
        }
        return keep_text(j, g->text, err);
    }
    if (j->r.tok == NULL) {
        (void)printf("%s%d", j->made.count > 1 ? "," : "", g->id);
    } else if (j->harmless) {
        put_harmless(g->text.p, g->text.bytes);
    } else if (g->text.bytes > 0) {
        (void)fwrite(g->text.p, 1, g->text.bytes, stdout); /* a failure shows when it is flushed */
    }
    return tsr_out_flush(err);
}

/* ---- results -------------------------------------------------------------------------------------------------------- */

static double rate(const tsr_generate_part *p)
{
    return p->ns > 0 ? (double)p->tokens * 1e9 / (double)p->ns : 0;
}

static json_t *part_json(const job *j, const tsr_generate_part *p)
{
    json_t *o = json_object();
    tsr_json_set(&o, "tokens", json_integer(p->tokens));
    tsr_json_set(&o, "seconds", tsr_json_number((double)p->ns * 1e-9));
    tsr_json_set(&o, "tokens_per_second", tsr_json_number(rate(p)));
    tsr_json_set(&o, "experts",
                 j->result.cached ? tsr_run_experts_json(&p->experts, p->tokens) : json_null());
    return o;
}

static tsr_status print_json(job *j, tsr_err *err)
{
    json_t *o = json_object(), *ids = json_array(), *prompt = json_array(), *stats = json_object();
    for (size_t i = 0; i < j->prompt.count; i++) {
        tsr_json_append(&prompt, json_integer(j->prompt.ids[i]));
    }
    for (size_t i = 0; i < j->made.count; i++) {
        tsr_json_append(&ids, json_integer(j->made.ids[i]));
    }
    tsr_run_facts(&j->r, &stats);
    tsr_json_set(&stats, "prefill", part_json(j, &j->result.prefill));
    tsr_json_set(&stats, "decode", part_json(j, &j->result.decode));
    tsr_json_set(&stats, "first_token_seconds",
                 j->result.tokens > 0 ? tsr_json_number((double)j->result.first_token_ns * 1e-9)
                                      : json_null());
    tsr_json_set(&o, "prompt_ids", prompt);
    tsr_json_set(&o, "ids", ids);
    tsr_json_set(&o, "text", j->r.tok != NULL ? tsr_json_bytes(j->text.p, j->text.count) : json_null());
    tsr_json_set(&o, "stop", tsr_json_text(tsr_stop_name(j->result.stop)));
    tsr_json_set(&o, "seed", tsr_json_u64(tsr_opt_number(j->a, "seed", 0)));
    if (j->logprobs != NULL) {
        tsr_json_set(&o, "logprobs", json_incref(j->logprobs));
    }
    tsr_json_set(&o, "stats", stats);
    return tsr_json_print(o, false, err);
}

static void print_part(const char *what, const job *j, const tsr_generate_part *p)
{
    char buf[TSR_SIZE_TEXT];
    const tsr_experts_stats *e = &p->experts;
    (void)fprintf(stderr, "%s: %lld tokens in %.3f s: %.2f tokens/s\n", what, (long long)p->tokens,
                  (double)p->ns * 1e-9, rate(p));
    if (j->result.cached && p->tokens > 0) {
        (void)fprintf(stderr,
                      "  experts: %" PRIu64 " asked, %" PRIu64 " hits, %" PRIu64
                      " misses, %s read a token, %.3f s waited\n",
                      e->asked, e->hits, e->misses, tsr_size_text(e->bytes_read / (uint64_t)p->tokens, buf),
                      (double)e->wait_ns * 1e-9);
    }
}

static void print_stats(job *j)
{
    tsr_meter_clear(&j->cli->meter);
    print_part("prefill", j, &j->result.prefill);
    print_part("decode", j, &j->result.decode);
    if (j->result.tokens > 0) {
        (void)fprintf(stderr, "first token after %.3f s; ended by: %s\n",
                      (double)j->result.first_token_ns * 1e-9, tsr_stop_name(j->result.stop));
    }
    (void)fprintf(stderr, "backend %s, %d threads\n", j->r.backend->name, j->r.backend->threads);
}

/* ---- the command ------------------------------------------------------------------------------------------------------ */

static tsr_status load_state(job *j, tsr_err *err)
{
    int64_t count;
    int32_t *ids;
    TSR_TRY(tsr_session_load(j->r.session, tsr_opt_text(j->a, "load-state", NULL), &ids, &count, err));
    j->before_known = ids != NULL;
    j->before = (tsr_tokens){ .ids = ids, .count = ids != NULL ? (size_t)count : 0, .room = (size_t)count };
    return TSR_OK;
}

static tsr_status save_state(job *j, tsr_err *err)
{
    const tsr_tokens *const lists[] = { &j->prompt, &j->made };
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; i < lists[k]->count; i++) {
            TSR_TRY(tsr_tokens_push(&j->before, lists[k]->ids[i], err));
        }
    }
    /* the last token was made at the end of the context: it was not run */
    bool known = j->before_known && (int64_t)j->before.count >= tsr_session_length(j->r.session);
    return tsr_session_save(j->r.session, tsr_opt_text(j->a, "save-state", NULL),
                            known ? j->before.ids : NULL, err);
}

/* A target that will be refused is refused before the work. An empty folder is none. */
static tsr_status check_target(const job *j, tsr_err *err)
{
    const char *path = tsr_opt_text(j->a, "save-state", NULL);
    DIR *d = path != NULL ? opendir(path) : NULL;
    bool taken = path != NULL && d == NULL && access(path, F_OK) == 0;
    for (const struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        taken = taken || (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0);
    }
    if (d != NULL) {
        (void)closedir(d);
    }
    if (taken) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: exists already (choose another name, or remove it)", path);
    }
    return TSR_OK;
}

static tsr_status open_sampler(job *j, tsr_err *err)
{
    tsr_sampler_opts o = { .temperature = tsr_opt_real(j->a, "temperature", 0),
                           .top_k = (int64_t)tsr_opt_number(j->a, "top-k", 0),
                           .top_p = tsr_opt_real(j->a, "top-p", 1),
                           .min_p = tsr_opt_real(j->a, "min-p", 0),
                           .seed = tsr_opt_number(j->a, "seed", 0) };
    TSR_TRY(tsr_sampler_open(&j->sampler, j->r.spec->vocab, &o, err));
    if (tsr_opt_given(j->a, "logprobs")) {
        j->top_count = (int64_t)tsr_opt_number(j->a, "logprobs", 0);
        j->top_count = j->top_count < j->r.spec->vocab ? j->top_count : j->r.spec->vocab;
        j->logprobs = json_array();
        j->top = calloc((size_t)j->top_count + 1, sizeof *j->top);
        if (j->logprobs == NULL || j->top == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
    }
    return TSR_OK;
}

static tsr_status go(job *j, int64_t max_tokens, tsr_err *err)
{
    tsr_run *r = &j->r;
    bool chat = tsr_opt_given(j->a, "chat"), think = tsr_opt_given(j->a, "think"),
         raw = tsr_opt_given(j->a, "raw-bytes");
    int32_t close = chat && !think ? tsr_tokenizer_added_id(r->tok, "<|close|>") : -1;
    if (close >= 0 && r->end_count < TSR_RUN_STOPS_MAX) {
        r->ends[r->end_count++] = close; /* of the response */
    }
    tsr_generate_opts o = { .session = r->session,
                            .sampler = j->sampler,
                            .tok = r->tok,
                            .decode = raw     ? TSR_DECODE_RAW
                                      : think ? 0
                                              : TSR_DECODE_SKIP_SPECIAL,
                            .prompt = j->prompt.ids,
                            .prompt_count = (int64_t)j->prompt.count,
                            .chunk = tsr_run_chunk(r, (int64_t)j->prompt.count),
                            .max_tokens = max_tokens,
                            .stop_ids = r->ends,
                            .stop_id_count = tsr_opt_given(j->a, "ignore-eos") ? 0 : r->end_count,
                            .stop_texts = tsr_opt_get(j->a, "stop")->list,
                            .run_last = tsr_opt_given(j->a, "save-state"),
                            .cancel = j->cli->progress.cancel,
                            .fn = on_token,
                            .payload = j };
    TSR_TRY(tsr_generate(r->model, &o, &j->result, err));
    if (tsr_opt_given(j->a, "save-state")) {
        TSR_TRY(save_state(j, err));
    }
    if (j->cli->json) {
        TSR_TRY(print_json(j, err));
    } else if (!raw && max_tokens > 0) {
        (void)putchar('\n'); /* a failure shows when it is flushed */
    }
    if (tsr_opt_given(j->a, "stats")) {
        TSR_TRY(tsr_out_flush(err));
        print_stats(j);
    }
    return TSR_OK;
}

static tsr_status generate(job *j, tsr_err *err)
{
    int64_t max_tokens = (int64_t)tsr_opt_number(j->a, "max-tokens", DEFAULT_TOKENS), context;
    const char *state = tsr_opt_text(j->a, "load-state", NULL);
    TSR_TRY(check_choices(j, err));
    TSR_TRY(check_target(j, err));
    TSR_TRY(tsr_run_open(&j->r, j->cli, j->a, err));
    TSR_TRY(take_prompt(j, err));
    TSR_TRY(open_sampler(j, err));
    if (state != NULL) {
        TSR_TRY(peek_state(j, state, err));
    }
    TSR_TRY(context_of(j, max_tokens, &context, err));
    TSR_TRY(tsr_run_load(&j->r, context, tsr_run_chunk(&j->r, (int64_t)j->prompt.count), err));
    if (state != NULL) {
        TSR_TRY(load_state(j, err));
    } else {
        j->before_known = true;
    }
    return go(j, max_tokens, err);
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    job j = { .cli = cli, .a = a, .harmless = isatty(STDOUT_FILENO) };
    tsr_status st = generate(&j, err);
    tsr_run_close(&j.r);
    tsr_sampler_close(&j.sampler);
    tsr_tokens_free(&j.before);
    tsr_tokens_free(&j.prompt);
    tsr_tokens_free(&j.made);
    tsr_bytes_free(&j.text);
    json_decref(j.logprobs);
    free(j.top);
    return st;
}

const tsr_cmd tsr_cmd_generate = { .name = "generate",
                                   .what = "Let a model go on from a prompt",
                                   .synopsis = synopsis,
                                   .description = description,
                                   .options = options,
                                   .examples = examples,
                                   .see_also = see_also,
                                   .operand_min = 1,
                                   .operand_max = 2,
                                   .run = run };
