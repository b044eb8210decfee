/* run.c - opening what generate and eval work on. Whatever can be refused is refused before weights are read. */
#include "cli/run.h"
#include "cli/out.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ASSET_BYTES_MAX ((uint64_t)512 << 20)
#define FILE_BYTES_MAX ((size_t)1 << 30)

/* ---- reading files ------------------------------------------------------------------------------------------- */

static tsr_status read_stream(FILE *f, const char *name, size_t most, char **out, size_t *bytes, tsr_err *err)
{
    size_t room = 0;
    *out = NULL;
    *bytes = 0;
    for (size_t n = 1; n > 0; *bytes += n) {
        if (room - *bytes < 2) {
            room = room * 2 + 65536;
            char *grown = *bytes <= most ? realloc(*out, room) : NULL;
            if (grown == NULL) {
                free(*out);
                *out = NULL;
                TSR_FAIL(err, TSR_E_LIMIT, "%s: is too long (%zu bytes at most)", name, most);
            }
            *out = grown;
        }
        n = fread(*out + *bytes, 1, room - *bytes - 1, f);
    }
    (*out)[*bytes] = '\0';
    if (ferror(f)) {
        free(*out);
        *out = NULL;
        TSR_FAIL(err, TSR_E_IO, "%s: cannot be read: %s", name, strerror(errno));
    }
    return TSR_OK;
}

tsr_status tsr_run_read_file(const char *path, char **out, size_t *bytes, tsr_err *err)
{
    if (strcmp(path, "-") == 0) {
        return read_stream(stdin, "standard input", FILE_BYTES_MAX, out, bytes, err);
    }
    FILE *f = fopen(path, "re");
    *out = NULL;
    if (f == NULL) {
        TSR_FAIL(err, errno == ENOENT ? TSR_E_MISSING : TSR_E_IO, "%s: cannot be opened: %s", path,
                 strerror(errno));
    }
    tsr_status st = read_stream(f, path, FILE_BYTES_MAX, out, bytes, err);
    (void)fclose(f);
    return st;
}

tsr_status tsr_run_asset(const tsr_run *r, const char *name, char **out, size_t *bytes, tsr_err *err)
{
    tsr_source *s = r->view.source;
    *out = NULL;
    *bytes = 0;
    for (int64_t i = 0; i < s->asset_count; i++) {
        const tsr_src_asset *a = &s->assets[i];
        if (strcmp(a->name, name) != 0) {
            continue;
        }
        if (a->bytes > ASSET_BYTES_MAX) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: %s: has %" PRIu64 " bytes (%" PRIu64 " at most)", r->path, name,
                     a->bytes, ASSET_BYTES_MAX);
        }
        if (a->path != NULL) {
            return tsr_run_read_file(a->path, out, bytes, err);
        }
        *bytes = (size_t)a->bytes;
        if (a->data == NULL) {
            return s->ops->read_asset(s, i, out, err);
        }
        *out = malloc(*bytes + 1);
        if (*out == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        memcpy(*out, a->data, *bytes);
        (*out)[*bytes] = '\0';
        return TSR_OK;
    }
    return TSR_OK;
}

/* ---- tokenizer ------------------------------------------------------------------------------------------------- */

/* A key of a configuration, or of its text part. */
static json_t *config_key(json_t *root, const char *key)
{
    json_t *v = json_object_get(root, key);
    return v != NULL && !json_is_null(v) ? v : json_object_get(json_object_get(root, "text_config"), key);
}

static int32_t as_id(const tsr_run *r, const json_t *v)
{
    json_int_t id = json_integer_value(v);
    return json_is_integer(v) && id >= 0 && id < r->spec->vocab ? (int32_t)id : -1;
}

static void add_end(tsr_run *r, int32_t id)
{
    bool known = id < 0 || id >= r->spec->vocab || r->end_count == TSR_RUN_STOPS_MAX;
    for (size_t i = 0; !known && i < r->end_count; i++) {
        known = r->ends[i] == id;
    }
    if (!known) {
        r->ends[r->end_count++] = id;
    }
}

/* Begin and end tokens that a configuration names by their ids. */
static void take_ids(tsr_run *r, const char *text, size_t bytes)
{
    json_t *root = text != NULL ? json_loadb(text, bytes, 0, NULL) : NULL, *v;
    json_t *bos = config_key(root, "bos_token_id"), *eos = config_key(root, "eos_token_id");
    size_t i;
    r->bos = r->bos >= 0 ? r->bos : as_id(r, bos);
    add_end(r, as_id(r, eos));
    json_array_foreach(eos, i, v)
    {
        add_end(r, as_id(r, v));
    }
    json_decref(root);
}

/* Where the tokenizer names them it is believed first; "[EOT]" and the end of a message end a text too. */
static tsr_status find_ends(tsr_run *r, tsr_err *err)
{
    static const char *const also[] = { "[EOT]", "<|end_of_msg|>" };
    char *text;
    size_t bytes;
    r->bos = -1;
    if (r->tok != NULL) {
        tsr_tokenizer_info info = tsr_tokenizer_info_of(r->tok);
        r->bos = info.bos;
        add_end(r, info.eos);
        for (size_t i = 0; i < sizeof also / sizeof *also; i++) {
            add_end(r, tsr_tokenizer_added_id(r->tok, also[i]));
        }
    }
    TSR_TRY(tsr_run_asset(r, "generation_config.json", &text, &bytes, err));
    take_ids(r, text, bytes);
    free(text);
    take_ids(r, r->view.source->config_json, r->view.source->config_bytes);
    return TSR_OK;
}

static tsr_status open_tokenizer(tsr_run *r, tsr_err *err)
{
    char *ranks = NULL, *config = NULL;
    size_t ranks_bytes = 0, config_bytes = 0;
    tsr_status st = tsr_run_asset(r, "tiktoken.model", &ranks, &ranks_bytes, err);
    if (st == TSR_OK) {
        st = tsr_run_asset(r, "tokenizer_config.json", &config, &config_bytes, err);
    }
    if (st == TSR_OK && (ranks != NULL || r->spec->vocab >= 256)) {
        tsr_tokenizer_opts o = { .ranks = { ranks, ranks_bytes },
                                 .config = { config, config_bytes },
                                 .vocab = r->spec->vocab };
        st = tsr_tokenizer_open(&r->tok, &o, err);
        if (st != TSR_OK) {
            tsr_err_prefix(err, "%s", r->path);
        }
    }
    free(ranks);
    free(config);
    return st == TSR_OK ? find_ends(r, err) : st;
}

tsr_status tsr_run_need_text(tsr_run *r, tsr_err *err)
{
    if (r->tok == NULL) {
        TSR_FAIL(
            err, TSR_E_UNSUPPORTED,
            "%s: has no tiktoken.model, and a vocabulary of %lld tokens has no room for bytes (use --ids)",
            r->path, (long long)r->spec->vocab);
    }
    if (tsr_tokenizer_info_of(r->tok).built_in) {
        tsr_cli_warn(r->cli, "%s: has no tiktoken.model: bytes are taken as tokens", r->path);
    }
    return TSR_OK;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static tsr_status open_view(tsr_run *r, tsr_err *err)
{
    bool tie = tsr_opt_given(r->args, "tie-head");
    uint64_t limit = tsr_opt_number(r->args, "mem-limit", 0);
    const tsr_source_opts so = { .mem_limit = limit };
    const tsr_map_opts mo = { .mem_limit = limit, .tie_head = tie };
    TSR_TRY(tsr_view_open(&r->view, r->path, tsr_opt_text(r->args, "arch", NULL), &so, &mo, err));
    const tsr_source *s = r->view.source;
    for (int64_t i = 0; i < s->warning_count; i++) {
        tsr_cli_warn(r->cli, "%s", s->warnings[i]);
    }
    for (int64_t i = 0; i < r->view.map->warning_count; i++) {
        tsr_cli_warn(r->cli, "%s", r->view.map->warnings[i]);
    }
    tsr_cli_note(r->cli, "%s: taken for a %s, names: %s", r->path, s->what, r->view.map->layout->what);
    if (s->config_json == NULL) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: config.json: is missing (it says what model this is)", r->path);
    }
    r->spec = calloc(1, sizeof *r->spec);
    if (r->spec == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    tsr_status st = tsr_spec_parse(r->spec, s->config_json, s->config_bytes, err);
    if (st != TSR_OK) {
        tsr_err_prefix(err, "%s", r->path);
        return st;
    }
    if (tie && tsr_map_find(r->view.map, "head.weight", &(uint32_t){ 0 }) < 0) {
        r->spec->tied_embeddings = true;
    }
    return TSR_OK;
}

tsr_status tsr_run_open(tsr_run *r, tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    *r = (tsr_run){ .cli = cli, .args = a, .path = a->operands[0], .bos = -1 };
    TSR_TRY(open_view(r, err));
    return open_tokenizer(r, err);
}

tsr_status tsr_run_load(tsr_run *r, int64_t context, int64_t max_tokens, tsr_err *err)
{
    const tsr_args *a = r->args;
    tsr_dtype cache = strcmp(tsr_opt_text(a, "cache-dtype", "f32"), "bf16") == 0 ? TSR_DT_BF16 : TSR_DT_F32;
    tsr_model_opts o = { .max_tokens = max_tokens,
                         .expert_cache = tsr_opt_number(a, "expert-cache", 0),
                         .mem_limit = tsr_opt_number(a, "mem-limit", 0) };
    tsr_plan plan;
    TSR_TRY(tsr_backend_open(&r->backend, tsr_opt_text(a, "backend", "auto"), r->cli->threads, err));
    TSR_TRY(tsr_view_weights(&r->source, &r->view, err));
    tsr_status st = tsr_model_plan(&plan, r->spec, &r->source, &o, r->backend, context, cache, err);
    if (st == TSR_OK) {
        tsr_cli_note(r->cli,
                     "%s on %s, %d threads: %" PRIu64 " MiB: weights %" PRIu64 ", experts %" PRIu64
                     " of %" PRIu64 ", workspace %" PRIu64,
                     r->path, r->backend->name, r->backend->threads, plan.total >> 20, plan.weights >> 20,
                     plan.experts >> 20, plan.experts_all >> 20, plan.workspace >> 20);
        st = tsr_model_open(&r->model, r->spec, &r->source, &o, r->backend, &r->cli->progress, err);
    }
    if (st != TSR_OK) {
        if (st != TSR_E_CANCELLED && strncmp(err->msg, r->path, strlen(r->path)) != 0) {
            tsr_err_prefix(err, "%s", r->path);
        }
        return st;
    }
    return tsr_session_open(&r->session, r->model, context, cache, err);
}

void tsr_run_close(tsr_run *r)
{
    tsr_session_close(&r->session);
    tsr_model_close(&r->model);
    tsr_backend_close(&r->backend);
    tsr_view_weights_done(&r->source);
    tsr_tokenizer_close(&r->tok);
    tsr_view_close(&r->view);
    free(r->spec);
    r->spec = NULL;
}

/* ---- settings ------------------------------------------------------------------------------------------------------ */

tsr_status tsr_run_context(const tsr_run *r, int64_t *out, tsr_err *err)
{
    int64_t stated = r->spec->context > 0 && !tsr_opt_given(r->args, "allow-longer") ? r->spec->context
                                                                                     : INT64_MAX,
            asked = (int64_t)tsr_opt_number(r->args, "context", INT64_MAX);
    *out = asked < stated ? asked : stated;
    if (tsr_opt_given(r->args, "context") && asked > stated) {
        TSR_FAIL(err, TSR_E_USAGE,
                 "--context %lld: the model's context is %lld (--allow-longer goes beyond it)",
                 (long long)asked, (long long)stated);
    }
    return TSR_OK;
}

int64_t tsr_run_chunk(const tsr_run *r, int64_t tokens)
{
    int64_t chunk = (int64_t)tsr_opt_number(r->args, "prefill-chunk", TSR_RUN_CHUNK);
    tokens = tokens > 1 ? tokens : 1;
    return chunk < tokens ? chunk : tokens;
}

tsr_status tsr_tokens_push(tsr_tokens *t, int32_t id, tsr_err *err)
{
    if (t->count == t->room) {
        size_t room = t->room * 2 + 64;
        int32_t *grown = realloc(t->ids, room * sizeof *grown);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        t->ids = grown;
        t->room = room;
    }
    t->ids[t->count++] = id;
    return TSR_OK;
}

tsr_status tsr_run_ids(const tsr_run *r, tsr_tokens *out, tsr_err *err)
{
    const char *text = tsr_opt_text(r->args, "ids", "");
    for (const char *p = text;; p++) {
        char word[24];
        uint64_t id;
        size_t n = strcspn(p, ",");
        if (n == 0 || n >= sizeof word) {
            TSR_FAIL(err, TSR_E_USAGE, "--ids: entry %zu is not a token id", out->count + 1);
        }
        memcpy(word, p, n);
        word[n] = '\0';
        TSR_TRY(tsr_parse_uint("--ids", word, 0, (uint64_t)r->spec->vocab - 1, &id, err));
        TSR_TRY(tsr_tokens_push(out, (int32_t)id, err));
        p += n;
        if (*p == '\0') {
            return TSR_OK;
        }
    }
}

/* ---- facts ----------------------------------------------------------------------------------------------------------- */

json_t *tsr_run_experts_json(const tsr_experts_stats *e, int64_t tokens)
{
    json_t *o = json_object();
    tsr_json_set(&o, "asked", tsr_json_u64(e->asked));
    tsr_json_set(&o, "hits", tsr_json_u64(e->hits));
    tsr_json_set(&o, "misses", tsr_json_u64(e->misses));
    tsr_json_set(&o, "prefetched", tsr_json_u64(e->prefetched));
    tsr_json_set(&o, "bytes_read", tsr_json_u64(e->bytes_read));
    tsr_json_set(&o, "bytes_read_per_token",
                 tokens > 0 ? tsr_json_number((double)e->bytes_read / (double)tokens) : json_null());
    tsr_json_set(&o, "wait_seconds", tsr_json_number((double)e->wait_ns * 1e-9));
    return o;
}

void tsr_run_facts(const tsr_run *r, json_t **obj)
{
    const tsr_plan *p = tsr_model_plan_of(r->model);
    uint64_t per_token, state = tsr_session_bytes(r->session, &per_token);
    tsr_json_set(obj, "backend", tsr_json_text(r->backend->name));
    tsr_json_set(obj, "threads", json_integer(r->backend->threads));
    tsr_json_set(obj, "weight_bytes", tsr_json_u64(p->weights));
    tsr_json_set(obj, "expert_bytes", tsr_json_u64(p->experts));
    tsr_json_set(obj, "expert_bytes_all", tsr_json_u64(p->experts_all));
    tsr_json_set(obj, "workspace_bytes", tsr_json_u64(p->workspace));
    tsr_json_set(obj, "state_bytes", tsr_json_u64(state));
    tsr_json_set(obj, "state_bytes_per_token", tsr_json_u64(per_token));
}
