/* cmd_data.c - tessera data: text becomes tokens on disk for training; what such a folder holds. */
#include "cli/cli.h"
#include "cli/out.h"
#include "cli/run.h"
#include "train/data.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const synopsis[] = { "build [OPTION]... SRC... --out DATA", "info DATA", "verify DATA",
                                        "show DATA --doc N [--split held]", NULL };
static const char *const description[] = {
    "build tokenises text into the new folder DATA. A SRC is a file or a folder, which is walked in byte "
    "order of its names. "
    "By name, .jsonl and .ndjson hold a document a line, .tar a document (or JSON lines) a member; any other "
    "file is one "
    "document of UTF-8 text. Each may be compressed (.gz, .zst, .xz, .bz2). Empty documents are left out. "
    "The same input and "
    "options give the same bytes whatever the number of threads.",
    "Without --tokenizer, bytes are taken as tokens. Every document is ended by the tokenizer's end token, "
    "if it names one.",
    "A build that was killed goes on when the same command is given again.",
    "info says how many documents, tokens and bytes of text there are, and how long the documents are. "
    "verify compares every "
    "byte with its checksum and every token with the vocabulary. show prints the text of a document; the "
    "first one is 0.",
    NULL,
};
static const tsr_opt options[] = {
    { "out", 'o', TSR_OPT_TEXT, "DATA", 0, 0, "build: the folder to make; it must not exist." },
    { "tokenizer", 0, TSR_OPT_TEXT, "DIR", 0, 0,
      "build: where tiktoken.model and tokenizer_config.json are." },
    { "text-key", 0, TSR_OPT_TEXT, "KEY", 0, 0, "build: the key of the text in JSON lines. Default: text." },
    { "held-out", 0, TSR_OPT_REAL, "SHARE", 0, 1,
      "build: share of the documents, up to 0.5, that is kept apart for evaluation. Default: 0." },
    { "seed", 0, TSR_OPT_UINT, "N", 0, UINT64_MAX,
      "build: chooses the documents of --held-out. Default: 0." },
    { "shard-tokens", 0, TSR_OPT_UINT, "N", 1, (uint64_t)1 << 40,
      "build: a file is closed by the document that brings it to N tokens. Default: 67108864." },
    { "no-eos", 0, TSR_OPT_FLAG, NULL, 0, 0, "build: do not end documents by the end token." },
    { "restart", 0, TSR_OPT_FLAG, NULL, 0, 0, "build: throw away what an interrupted build has left." },
    { "doc", 0, TSR_OPT_UINT, "N", 0, INT64_MAX, "show: the number of the document." },
    { "split", 0, TSR_OPT_CHOICE, "train|held", 0, 0, "show: of these documents. Default: train." },
    TSR_OPT_END,
};
static const tsr_pair examples[] = {
    { "tessera data build --tokenizer k3/ --held-out 0.01 books/ web.jsonl.zst --out data",
      "Tokens of a folder of books and of JSON lines." },
    { "tessera data info data", "What came of it." },
    { "tessera data show data --doc 7 --split held", "A text that training does not see." },
    { 0 },
};
static const tsr_pair files[] = {
    { "DATA/data.json", "Facts, and the list of the other files with their checksums." },
    { "DATA/train-NNNNN.tok, .idx", "Tokens, and the borders of documents; held-NNNNN likewise." },
    { "DATA/tokenizer/", "Copies of the tokenizer's files." },
    { ".DATA.partial", "What a build has finished, until it is complete." },
    { 0 },
};
static const char *const see_also[] = { "eval", "verify", NULL };

#define CLASSES 63 /* of lengths: class k holds 2^k to 2^(k+1) - 1 tokens */

/* ---- build ---------------------------------------------------------------------------------------------------- */

static tsr_status print_built(const tsr_cli *cli, const char *out, const tsr_data_stats *s, tsr_err *err)
{
    char size[TSR_SIZE_TEXT];
    if (cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "destination", tsr_json_text(out));
        tsr_json_set(&o, "files", tsr_json_u64(s->files));
        tsr_json_set(&o, "documents", tsr_json_u64(s->documents));
        tsr_json_set(&o, "skipped", tsr_json_u64(s->skipped));
        tsr_json_set(&o, "resumed_documents", tsr_json_u64(s->resumed_docs));
        tsr_json_set(&o, "text_bytes", tsr_json_u64(s->bytes));
        for (int i = 0; i < TSR_SPLIT_COUNT; i++) {
            json_t *split = json_object();
            tsr_json_set(&split, "documents", tsr_json_u64(s->docs[i]));
            tsr_json_set(&split, "tokens", tsr_json_u64(s->tokens[i]));
            tsr_json_set(&o, tsr_split_name((tsr_split)i), split);
        }
        return tsr_json_print(o, false, err);
    }
    tsr_cli_say(cli,
                "%s: %" PRIu64 " document%s, %s of text in %" PRIu64 " file%s: %" PRIu64
                " tokens to train on, %" PRIu64 " held out",
                out, s->documents, s->documents == 1 ? "" : "s", tsr_size_text(s->bytes, size), s->files,
                s->files == 1 ? "" : "s", s->tokens[TSR_SPLIT_TRAIN], s->tokens[TSR_SPLIT_HELD]);
    if (s->skipped > 0) {
        tsr_cli_say(cli, "%" PRIu64 " empty document%s left out", s->skipped, s->skipped == 1 ? "" : "s");
    }
    if (s->resumed_docs > 0) {
        tsr_cli_say(cli, "%" PRIu64 " documents were finished before", s->resumed_docs);
    }
    return TSR_OK;
}

static tsr_status build(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    tsr_data_stats stats;
    const char *out = tsr_opt_text(a, "out", NULL);
    tsr_data_build_opts o = { .tokenizer = tsr_opt_text(a, "tokenizer", NULL),
                              .text_key = tsr_opt_text(a, "text-key", NULL),
                              .held_out = tsr_opt_real(a, "held-out", 0),
                              .seed = tsr_opt_number(a, "seed", 0),
                              .shard_tokens = tsr_opt_number(a, "shard-tokens", 0),
                              .no_eos = tsr_opt_given(a, "no-eos"),
                              .restart = tsr_opt_given(a, "restart"),
                              .threads = cli->threads,
                              .mem_limit = cli->mem_limit,
                              .progress = cli->progress };
    if (out == NULL) {
        TSR_FAIL(err, TSR_E_USAGE, "data build: needs --out");
    }
    if (o.tokenizer == NULL) {
        tsr_cli_note(cli, "no --tokenizer: bytes are taken as tokens");
    }
    TSR_TRY(tsr_data_build(a->operands + 1, a->operand_count - 1, out, &o, &stats, err));
    tsr_meter_clear(&cli->meter);
    return print_built(cli, out, &stats, err);
}

/* ---- info ------------------------------------------------------------------------------------------------------ */

typedef struct lengths {
    int64_t low, high, classes[CLASSES];
} lengths;

static lengths lengths_of(const tsr_data *d, tsr_split s)
{
    lengths l = { .low = 0 };
    for (int64_t i = 0; i < tsr_data_docs(d, s); i++) {
        int64_t n = tsr_data_doc_length(d, s, i);
        l.low = i == 0 || n < l.low ? n : l.low;
        l.high = n > l.high ? n : l.high;
        l.classes[63 - __builtin_clzll((uint64_t)n)]++;
    }
    return l;
}

static json_t *split_json(const tsr_data *d, tsr_split s)
{
    lengths l = lengths_of(d, s);
    json_t *o = json_object(), *lengths_json = json_object(), *classes = json_array();
    int64_t docs = tsr_data_docs(d, s), tokens = tsr_data_tokens(d, s);
    for (int k = 0; k < CLASSES && l.high >> k != 0; k++) {
        tsr_json_append(&classes, json_integer(l.classes[k]));
    }
    tsr_json_set(&lengths_json, "min", json_integer(l.low));
    tsr_json_set(&lengths_json, "mean", tsr_json_number(docs > 0 ? (double)tokens / (double)docs : 0));
    tsr_json_set(&lengths_json, "max", json_integer(l.high));
    tsr_json_set(&lengths_json, "histogram", classes);
    tsr_json_set(&o, "documents", json_integer(docs));
    tsr_json_set(&o, "tokens", json_integer(tokens));
    tsr_json_set(&o, "text_bytes", tsr_json_u64(tsr_data_text_bytes(d, s)));
    tsr_json_set(&o, "lengths", lengths_json);
    return o;
}

static tsr_status info_json(const tsr_data *d, const char *path, tsr_err *err)
{
    json_t *o = json_object(), *names = json_array();
    char hash[17];
    (void)snprintf(hash, sizeof hash, "%016" PRIx64, tsr_data_hash(d));
    for (size_t i = 0; tsr_data_tokenizer_file(d, i) != NULL; i++) {
        tsr_json_append(&names, tsr_json_text(tsr_data_tokenizer_file(d, i)));
    }
    tsr_json_set(&o, "path", tsr_json_text(path));
    tsr_json_set(&o, "hash", tsr_json_text(hash));
    tsr_json_set(&o, "vocab", json_integer(tsr_data_vocab(d)));
    tsr_json_set(&o, "eos", tsr_data_eos(d) >= 0 ? json_integer(tsr_data_eos(d)) : json_null());
    tsr_json_set(&o, "tokenizer_files", names);
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        tsr_json_set(&o, tsr_split_name((tsr_split)s), split_json(d, (tsr_split)s));
    }
    return tsr_json_print(o, false, err);
}

static void info_split(const tsr_data *d, tsr_split s)
{
    char size[TSR_SIZE_TEXT];
    int64_t docs = tsr_data_docs(d, s), tokens = tsr_data_tokens(d, s);
    (void)printf("%-11s %" PRId64 " document%s, %" PRId64 " tokens, %s of text\n", tsr_split_name(s), docs,
                 docs == 1 ? "" : "s", tokens, tsr_size_text(tsr_data_text_bytes(d, s), size));
    if (docs == 0) {
        return;
    }
    lengths l = lengths_of(d, s);
    (void)printf("  lengths   %" PRId64 " to %" PRId64 " tokens, %.1f on average\n", l.low, l.high,
                 (double)tokens / (double)docs);
    for (int k = 0; k < CLASSES; k++) {
        if (l.classes[k] > 0) {
            (void)printf("  %8" PRId64 " to %8" PRId64 "  %" PRId64 "\n", (int64_t)1 << k,
                         (int64_t)(((uint64_t)2 << k) - 1), l.classes[k]);
        }
    }
}

static tsr_status info(tsr_cli *cli, const tsr_data *d, const char *path, tsr_err *err)
{
    if (cli->json) {
        return info_json(d, path, err);
    }
    (void)printf("hash        %016" PRIx64 "\n", tsr_data_hash(d));
    (void)printf("tokenizer   %s, %" PRId64 " ids\n",
                 tsr_data_tokenizer_file(d, 0) != NULL ? "tiktoken" : "bytes", tsr_data_vocab(d));
    if (tsr_data_eos(d) >= 0) {
        (void)printf("end token   %" PRId32 "\n", tsr_data_eos(d));
    } else {
        (void)printf("end token   none\n");
    }
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        info_split(d, (tsr_split)s);
    }
    return TSR_OK;
}

/* ---- verify ------------------------------------------------------------------------------------------------------ */

static tsr_status verify(tsr_cli *cli, const tsr_data *d, const char *path, tsr_err *err)
{
    TSR_TRY(tsr_data_verify(d, &cli->progress, err));
    tsr_meter_clear(&cli->meter);
    int64_t docs = 0, tokens = 0;
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        docs += tsr_data_docs(d, (tsr_split)s);
        tokens += tsr_data_tokens(d, (tsr_split)s);
    }
    if (cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "path", tsr_json_text(path));
        tsr_json_set(&o, "documents", json_integer(docs));
        tsr_json_set(&o, "tokens", json_integer(tokens));
        return tsr_json_print(o, false, err);
    }
    tsr_cli_say(cli, "%s: %" PRId64 " documents, %" PRId64 " tokens, no damage", path, docs, tokens);
    return TSR_OK;
}

/* ---- show ---------------------------------------------------------------------------------------------------------- */

static tsr_status read_tokenizer(const tsr_data *d, tsr_tokenizer **out, tsr_err *err)
{
    static const char *const names[] = { "tiktoken.model", "tokenizer_config.json" };
    char *text[2] = { NULL, NULL };
    size_t bytes[2] = { 0, 0 };
    tsr_status st = TSR_OK;
    *out = NULL;
    for (size_t i = 0; st == TSR_OK && tsr_data_tokenizer_file(d, i) != NULL; i++) {
        for (int k = 0; st == TSR_OK && k < 2; k++) {
            char *path;
            if (strcmp(tsr_data_tokenizer_file(d, i), names[k]) != 0) {
                continue;
            }
            if (asprintf(&path, "%s/tokenizer/%s", tsr_data_path(d), names[k]) < 0) {
                st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
                break;
            }
            st = tsr_run_read_file(path, &text[k], &bytes[k], err);
            free(path);
        }
    }
    if (st == TSR_OK) {
        tsr_tokenizer_opts o = { .ranks = { text[0], bytes[0] },
                                 .config = { text[1], bytes[1] },
                                 .byte_added = text[0] == NULL,
                                 .vocab = tsr_data_vocab(d) };
        st = tsr_tokenizer_open(out, &o, err);
    }
    free(text[0]);
    free(text[1]);
    return st;
}

static tsr_status print_doc(const tsr_cli *cli, const tsr_bytes *text, int64_t doc, tsr_split s,
                            int64_t tokens, tsr_err *err)
{
    if (cli->json) {
        json_t *o = json_object();
        tsr_json_set(&o, "split", tsr_json_text(tsr_split_name(s)));
        tsr_json_set(&o, "document", json_integer(doc));
        tsr_json_set(&o, "tokens", json_integer(tokens));
        tsr_json_set(&o, "text", tsr_json_bytes(text->count > 0 ? text->p : "", text->count));
        return tsr_json_print(o, false, err);
    }
    if (isatty(STDOUT_FILENO) == 1) { /* a terminal is not steered by a document */
        for (size_t i = 0; i < text->count; i++) {
            unsigned char c = (unsigned char)text->p[i];
            bool plain = (c >= 0x20 && c != 0x7f) || c == '\n' || c == '\t';
            (void)(plain ? printf("%c", c) : printf("\\x%02x", c)); /* failures show when it is flushed */
        }
    } else {
        (void)fwrite(text->p, 1, text->count, stdout);
    }
    return tsr_out_flush(err);
}

static tsr_status show(tsr_cli *cli, const tsr_args *a, const tsr_data *d, tsr_err *err)
{
    tsr_split s = strcmp(tsr_opt_text(a, "split", "train"), "held") == 0 ? TSR_SPLIT_HELD : TSR_SPLIT_TRAIN;
    int64_t doc = (int64_t)tsr_opt_number(a, "doc", 0);
    tsr_tokenizer *tok = NULL;
    tsr_bytes text = { 0 };
    int32_t *ids = NULL;
    if (!tsr_opt_given(a, "doc")) {
        TSR_FAIL(err, TSR_E_USAGE, "data show: needs --doc");
    }
    if (doc >= tsr_data_docs(d, s)) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: --doc %" PRId64 ": has %" PRId64 " %s documents, numbered from 0",
                 tsr_data_path(d), doc, tsr_data_docs(d, s), tsr_split_name(s));
    }
    int64_t n = tsr_data_doc_length(d, s, doc), tokens = n;
    tsr_status st = read_tokenizer(d, &tok, err);
    if (st == TSR_OK) {
        ids = malloc((size_t)n * sizeof *ids);
        st = ids != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory for %" PRId64 " tokens", n);
    }
    if (st == TSR_OK) {
        tsr_data_copy(d, s, doc, 0, n, ids);
        n -= tsr_data_eos(d) >= 0 && ids[n - 1] == tsr_data_eos(d); /* not part of the text */
        st = tsr_tokenizer_decode(tok, ids, (size_t)n, TSR_DECODE_RAW, &text, err);
        if (st != TSR_OK) {
            tsr_err_prefix(err, "%s: document %" PRId64, tsr_data_path(d), doc);
        }
    }
    if (st == TSR_OK) {
        st = print_doc(cli, &text, doc, s, tokens, err);
    }
    tsr_bytes_free(&text);
    free(ids);
    tsr_tokenizer_close(&tok);
    return st;
}

/* ---- the command ---------------------------------------------------------------------------------------------------- */

/* Refuses options of another action. */
static tsr_status check_options(const tsr_args *a, const char *action, tsr_err *err)
{
    for (const tsr_opt *o = options; o->name != NULL; o++) {
        size_t n = strcspn(o->what, ":");
        if (tsr_opt_given(a, o->name) && (strlen(action) != n || strncmp(o->what, action, n) != 0)) {
            TSR_FAIL(err, TSR_E_USAGE, "--%s: goes with data %.*s, not with %s", o->name, (int)n, o->what,
                     action);
        }
    }
    return TSR_OK;
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    static const char *const actions[] = { "build", "info", "verify", "show", NULL };
    const char *action = a->operands[0];
    int which = 0;
    while (actions[which] != NULL && strcmp(actions[which], action) != 0) {
        which++;
    }
    if (actions[which] == NULL) {
        const char *near = tsr_nearest(action, actions);
        TSR_FAIL(err, TSR_E_USAGE, "data %s: no such action (%s%s)", action,
                 near != NULL ? "perhaps " : "build, info, verify or show", near != NULL ? near : "");
    }
    TSR_TRY(check_options(a, action, err));
    if (a->operand_count < 2 || (which > 0 && a->operand_count > 2)) {
        TSR_FAIL(err, TSR_E_USAGE, "data %s: needs %s", action, which == 0 ? "what to read" : "one folder");
    }
    if (which == 0) {
        return build(cli, a, err);
    }
    tsr_data *d;
    const char *path = a->operands[1];
    TSR_TRY(tsr_data_open(&d, path, err));
    tsr_status st = which == 1   ? info(cli, d, path, err)
                    : which == 2 ? verify(cli, d, path, err)
                                 : show(cli, a, d, err);
    tsr_data_close(&d);
    return st;
}

const tsr_cmd tsr_cmd_data = { .name = "data",
                               .what = "Make tokens for training of text, and look at them",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .files = files,
                               .see_also = see_also,
                               .operand_min = 1,
                               .operand_max = SIZE_MAX,
                               .run = run };
