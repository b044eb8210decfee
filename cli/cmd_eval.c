/* cmd_eval.c - tessera eval: how well a model predicts a text, and what it computes on the way. */
#include "cli/out.h"
#include "cli/run.h"
#include "cli/trace_file.h"
#include "model/evaluate.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const synopsis[] = { "[OPTION]... CKPT --text FILE", "[OPTION]... CKPT --ids N,N,...",
                                        NULL };
static const char *const description[] = {
    "Runs the model of a checkpoint over a text and prints how well it predicts every token: the loss (nats "
    "a token), "
    "perplexity, and bits a byte of the text. Tokens that nothing stands before, the first one unless --bos "
    "is given, "
    "are not predicted.",
    "The text is cut into windows of --context tokens, the model's own context when not given; each begins "
    "with an empty "
    "state (and the begin token, with --bos), and also predicts the first token of the next one. "
    "--allow-longer makes one "
    "window of everything. Inside a window --prefill-chunk tokens are run at once.",
    "--trace writes what the layers computed as a safetensors file: hidden states, logits, routing, states. "
    "It takes memory "
    "for all of it.",
    NULL,
};
static const tsr_opt options[] = {
    { "text", 0, TSR_OPT_TEXT, "FILE", 0, 0, "The text; - is standard input." },
    { "logprobs", 0, TSR_OPT_TEXT, "FILE", 0, 0,
      "Write the log probability of every token to FILE, one a line (nan: not predicted); a name ending in "
      ".json: a list." },
    { "routing", 0, TSR_OPT_TEXT, "FILE", 0, 0,
      "Write how often each expert of each layer was chosen to FILE, as JSON." },
    { "trace", 0, TSR_OPT_TEXT, "DIR", 0, 0, "Write DIR/trace.safetensors. One window only." },
    TSR_RUN_OPTIONS,
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera eval model.tsr --text book.txt --context 4096", "Perplexity in windows of 4096 tokens." },
    { "tessera eval model/ --ids 1,5,77 --trace out", "Everything the layers computed." },
    { 0 },
};
static const char *const see_also[] = { "generate", "backends", "info", NULL };

typedef struct job {
    tsr_run r;
    tsr_cli *cli;
    const tsr_args *a;
    tsr_tokens ids;
    float *logprob; /* [ids.count] */
    tsr_trace_file *trace;
    tsr_evaluate_result result;
    tsr_experts_stats experts;
    bool text, cached;
} job;

/* ---- input -------------------------------------------------------------------------------------------------- */

static tsr_status take_ids(job *j, tsr_err *err)
{
    char *text;
    size_t bytes;
    if (!j->text) {
        return tsr_run_ids(&j->r, &j->ids, err);
    }
    TSR_TRY(tsr_run_need_text(&j->r, err));
    TSR_TRY(tsr_run_read_file(tsr_opt_text(j->a, "text", "-"), &text, &bytes, err));
    tsr_status st = tsr_tokenizer_encode(j->r.tok, text, bytes, 0, &j->ids, err);
    free(text);
    TSR_TRY(st);
    if (j->ids.count == 0) {
        TSR_FAIL(err, TSR_E_USAGE, "%s: the text is empty", tsr_opt_text(j->a, "text", "-"));
    }
    return TSR_OK;
}

static tsr_status check_targets(const job *j, tsr_err *err)
{
    static const char *const names[] = { "logprobs", "routing" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *path = tsr_opt_text(j->a, names[i], NULL);
        if (path != NULL && access(path, F_OK) == 0) {
            TSR_FAIL(err, TSR_E_CONFLICT, "%s: exists already (choose another name, or remove it)", path);
        }
    }
    const char *dir = tsr_opt_text(j->a, "trace", NULL);
    return dir != NULL ? tsr_trace_file_check(dir, err) : TSR_OK;
}

static tsr_status window_of(job *j, int64_t *out, tsr_err *err)
{
    int64_t total = (int64_t)j->ids.count + tsr_opt_given(j->a, "bos");
    TSR_TRY(tsr_run_context(&j->r, out, err));
    *out = *out < total ? *out : total;
    if (tsr_opt_given(j->a, "bos") && j->r.bos < 0) {
        TSR_FAIL(err, TSR_E_USAGE, "--bos: %s names no begin token", j->r.path);
    }
    if (tsr_opt_given(j->a, "trace") && *out < total) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "--trace: %lld tokens do not fit one window of %lld (raise --context, or --allow-longer)",
                 (long long)total, (long long)*out);
    }
    return TSR_OK;
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

static tsr_status write_logprobs(const job *j, const char *path, tsr_err *err)
{
    tsr_out_file o;
    size_t n = strlen(path);
    bool json = n > 5 && strcmp(path + n - 5, ".json") == 0;
    TSR_TRY(tsr_out_file_open(&o, path, err));
    (void)fputs(json ? "[" : "", o.f); /* failures show when the file is closed */
    for (size_t i = 0; i < j->ids.count; i++) {
        double p = (double)j->logprob[i];
        (void)fputs(json && i > 0 ? ",\n" : "", o.f);
        if (json) {
            (void)fprintf(o.f, "{\"id\": %d, \"logprob\": ", j->ids.ids[i]);
        }
        if (isnan(p)) {
            (void)fputs(json ? "null" : "nan", o.f);
        } else {
            (void)fprintf(o.f, "%.9g", p);
        }
        (void)fputs(json ? "}" : "\n", o.f);
    }
    (void)fputs(json ? "]\n" : "", o.f);
    return tsr_out_file_close(&o, TSR_OK, err);
}

static tsr_status write_routing(const job *j, const char *path, tsr_err *err)
{
    const tsr_spec *s = j->r.spec;
    tsr_out_file o;
    json_t *all = json_object(), *layers = json_object();
    for (int32_t i = 0; i < s->layers; i++) {
        const uint64_t *counts = tsr_trace_file_counts(j->trace, i);
        char name[16];
        json_t *list = json_array();
        for (int64_t e = 0; counts != NULL && e < s->experts; e++) {
            tsr_json_append(&list, tsr_json_u64(counts[e]));
        }
        (void)snprintf(name, sizeof name, "%d", i);
        if (counts != NULL) {
            tsr_json_set(&layers, name, list);
        } else {
            json_decref(list);
        }
    }
    tsr_json_set(&all, "tokens", json_integer(j->result.tokens));
    tsr_json_set(&all, "experts", json_integer(s->experts));
    tsr_json_set(&all, "top_k", json_integer(s->top_k));
    tsr_json_set(&all, "layers", layers);
    tsr_status st = all != NULL ? tsr_out_file_open(&o, path, err)
                                : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        (void)json_dumpf(all, o.f, JSON_COMPACT); /* failures show when the file is closed */
        (void)fputc('\n', o.f);
        st = tsr_out_file_close(&o, TSR_OK, err);
    }
    json_decref(all);
    return st;
}

static tsr_status write_trace(const job *j, const char *dir, tsr_err *err)
{
    size_t bos = tsr_opt_given(j->a, "bos"), n = j->ids.count + bos;
    int32_t *ids = malloc(n * sizeof *ids);
    if (ids == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    ids[0] = j->r.bos;
    memcpy(ids + bos, j->ids.ids, j->ids.count * sizeof *ids);
    tsr_status st = tsr_trace_file_write(j->trace, dir, ids, err);
    free(ids);
    return st;
}

static tsr_status write_files(const job *j, tsr_err *err)
{
    const char *logprobs = tsr_opt_text(j->a, "logprobs", NULL),
               *routing = tsr_opt_text(j->a, "routing", NULL), *trace = tsr_opt_text(j->a, "trace", NULL);
    if (logprobs != NULL) {
        TSR_TRY(write_logprobs(j, logprobs, err));
    }
    if (routing != NULL) {
        TSR_TRY(write_routing(j, routing, err));
    }
    return trace != NULL ? write_trace(j, trace, err) : TSR_OK;
}

/* ---- results ---------------------------------------------------------------------------------------------------- */

/* Of the text; negative where it means nothing. */
static double bits_per_byte(const job *j)
{
    uint64_t bytes = 0;
    for (size_t i = 0; j->text && i < j->ids.count; i++) {
        bytes += isnan(j->logprob[i]) ? 0 : tsr_tokenizer_token(j->r.tok, j->ids.ids[i]).bytes;
    }
    return bytes > 0 ? j->result.loss / log(2) / (double)bytes : -1;
}

static tsr_status print_json(const job *j, tsr_err *err)
{
    const tsr_evaluate_result *r = &j->result;
    json_t *o = json_object();
    double loss = r->scored > 0 ? r->loss / (double)r->scored : NAN, bits = bits_per_byte(j);
    tsr_json_set(&o, "tokens", json_integer((json_int_t)j->ids.count));
    tsr_json_set(&o, "scored", json_integer(r->scored));
    tsr_json_set(&o, "windows", json_integer(r->windows));
    tsr_json_set(&o, "loss", tsr_json_number(loss));
    tsr_json_set(&o, "perplexity", tsr_json_number(exp(loss)));
    tsr_json_set(&o, "bits_per_byte", bits >= 0 ? tsr_json_number(bits) : json_null());
    tsr_json_set(&o, "seconds", tsr_json_number((double)r->ns * 1e-9));
    tsr_json_set(&o, "tokens_per_second",
                 tsr_json_number((double)r->tokens * 1e9 / (double)(r->ns > 0 ? r->ns : 1)));
    tsr_run_facts(&j->r, &o);
    tsr_json_set(&o, "experts", j->cached ? tsr_run_experts_json(&j->experts, r->tokens) : json_null());
    return tsr_json_print(o, false, err);
}

static void print_text(const job *j)
{
    const tsr_evaluate_result *r = &j->result;
    double bits = bits_per_byte(j);
    char size[TSR_SIZE_TEXT];
    (void)printf("tokens      %zu, %" PRId64 " predicted, %" PRId64 " window%s\n", j->ids.count, r->scored,
                 r->windows, r->windows == 1 ? "" : "s");
    if (r->scored > 0) {
        (void)printf("loss        %.6f nats a token\n", r->loss / (double)r->scored);
        (void)printf("perplexity  %.6g\n", exp(r->loss / (double)r->scored));
    }
    if (bits >= 0) {
        (void)printf("bits/byte   %.6f\n", bits);
    }
    (void)printf("speed       %.2f tokens/s (%s, %d threads)\n",
                 (double)r->tokens * 1e9 / (double)(r->ns > 0 ? r->ns : 1), j->r.backend->name,
                 j->r.backend->threads);
    if (j->cached) {
        (void)printf("experts     %" PRIu64 " asked, %" PRIu64 " hits, %" PRIu64 " misses, %s read\n",
                     j->experts.asked, j->experts.hits, j->experts.misses,
                     tsr_size_text(j->experts.bytes_read, size));
    }
}

/* ---- the command -------------------------------------------------------------------------------------------------- */

static tsr_status evaluate(job *j, tsr_err *err)
{
    int64_t window, total;
    bool trace = tsr_opt_given(j->a, "trace"), bos = tsr_opt_given(j->a, "bos");
    if (j->text == tsr_opt_given(j->a, "ids")) {
        TSR_FAIL(err, TSR_E_USAGE, "eval: needs %s of --text and --ids", j->text ? "only one" : "one");
    }
    TSR_TRY(check_targets(j, err));
    TSR_TRY(tsr_run_open(&j->r, j->cli, j->a, err));
    TSR_TRY(take_ids(j, err));
    TSR_TRY(window_of(j, &window, err));
    total = (int64_t)j->ids.count + bos;
    j->logprob = malloc(j->ids.count * sizeof *j->logprob);
    if (j->logprob == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    int64_t chunk = tsr_run_chunk(&j->r, window);
    TSR_TRY(tsr_run_load(&j->r, window, chunk, err));
    if (trace || tsr_opt_given(j->a, "routing")) {
        TSR_TRY(tsr_trace_file_open(&j->trace, j->r.spec, total, trace, err));
    }
    tsr_evaluate_opts o = { .session = j->r.session,
                            .ids = j->ids.ids,
                            .count = (int64_t)j->ids.count,
                            .chunk = chunk,
                            .bos = bos ? j->r.bos : -1,
                            .logprob = j->logprob,
                            .trace = j->trace != NULL ? tsr_trace_file_trace(j->trace) : NULL,
                            .logits = trace ? tsr_trace_file_logits : NULL,
                            .logits_payload = j->trace,
                            .progress = &j->cli->progress };
    TSR_TRY(tsr_evaluate(j->r.model, &o, &j->result, err));
    j->cached = tsr_model_expert_stats(j->r.model, &j->experts);
    TSR_TRY(write_files(j, err));
    if (j->cli->json) {
        return print_json(j, err);
    }
    print_text(j);
    return TSR_OK;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    job j = { .cli = cli, .a = a, .text = tsr_opt_given(a, "text") };
    tsr_status st = evaluate(&j, err);
    tsr_trace_file_close(&j.trace);
    tsr_run_close(&j.r);
    tsr_tokens_free(&j.ids);
    free(j.logprob);
    return st;
}

const tsr_cmd tsr_cmd_eval = { .name = "eval",
                               .what = "Measure how well a model predicts a text",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .see_also = see_also,
                               .operand_min = 1,
                               .operand_max = 1,
                               .run = run };
