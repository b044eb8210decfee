/* cmd_info.c - tessera info: what a checkpoint is. Facts are gathered once, into JSON, and printed from
 * there. */
#include "cli/cli.h"
#include "cli/list.h"
#include "cli/out.h"
#include "model/spec.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const synopsis[] = { "[OPTION]... PATH", NULL };
static const char *const description[] = {
    "Says what PATH was taken for and what it holds: model, layers and their kinds, experts, which shard "
    "holds which "
    "experts, sizes, files that travel along, training state and how the checkpoint came to be. Tensor data "
    "is never "
    "read; the heads of the shards are compared with the index, and a shard that is absent or another one's "
    "copy is "
    "an error after the facts.",
    NULL,
};
static const tsr_opt options[] = { TSR_OPT_END };
static const tsr_pair examples[] = {
    { "tessera info model.tsr", "For people." },
    { "tessera info --json model/ | jq .experts", "For scripts." },
    { 0 },
};
static const char *const see_also[] = { "ls", "verify", NULL };

#define FEW_LAYERS 8
#define RANGES_BYTES 2048

typedef struct about {
    tsr_cli *cli;
    tsr_list list;
    json_t *o, *manifest; /* manifest NULL for a foreign format */
    tsr_status late;      /* the first shard that is not what the index says */
    tsr_err late_err;
} about;

/* ---- gathering -------------------------------------------------------------------------------------------
 */

/* "0-2, 4" of the layers of one kind. */
static json_t *layers_of(const tsr_spec *s, tsr_layer_kind kind, int64_t *count)
{
    uint32_t ids[TSR_LAYER_MAX];
    char text[RANGES_BYTES];
    uint32_t n = 0;
    for (int32_t i = 0; i < s->layers; i++) {
        if (s->layer_kind[i] == (uint8_t)kind) {
            ids[n++] = (uint32_t)i;
        }
    }
    *count = n;
    return tsr_json_text(tsr_ranges_of(ids, n, text, sizeof text));
}

static json_t *model_facts(const tsr_spec *s)
{
    json_t *o = json_object(), *list = json_array();
    int64_t kda, mla;
    json_t *kda_layers = layers_of(s, TSR_LAYER_KDA, &kda), *mla_layers = layers_of(s, TSR_LAYER_MLA, &mla);
    for (int32_t i = 0; i < s->layers && s->layers <= FEW_LAYERS; i++) {
        tsr_json_append(&list, tsr_json_text(s->layer_kind[i] == TSR_LAYER_KDA ? "KDA" : "MLA"));
    }
    tsr_json_set(&o, "arch", tsr_json_text(tsr_arch_name(s->arch)));
    tsr_json_set(&o, "layers", json_integer(s->layers));
    tsr_json_set(&o, "kda_layers", kda_layers);
    tsr_json_set(&o, "mla_layers", mla_layers);
    tsr_json_set(&o, "kda_layer_count", json_integer(kda));
    tsr_json_set(&o, "mla_layer_count", json_integer(mla));
    tsr_json_set(&o, "kinds", list);
    tsr_json_set(&o, "first_dense", json_integer(s->first_dense));
    tsr_json_set(&o, "hidden", json_integer(s->hidden));
    tsr_json_set(&o, "vocab", json_integer(s->vocab));
    tsr_json_set(&o, "experts", json_integer(s->experts));
    tsr_json_set(&o, "top_k", json_integer(s->top_k));
    tsr_json_set(&o, "shared_experts", json_integer(s->shared_experts));
    tsr_spec_sizes z;
    if (tsr_spec_sizes_of(s, &z, NULL) == TSR_OK) {
        tsr_json_set(&o, "params_total", tsr_json_u64(z.params_total));
        tsr_json_set(&o, "params_active", tsr_json_u64(z.params_active));
    }
    return o;
}

/* The model's hyper-parameters, where the checkpoint has a configuration that is understood. */
static tsr_status add_model(about *b, tsr_err *err)
{
    const char *text = NULL;
    char *owned = NULL;
    size_t bytes = 0;
    if (b->list.ckpt != NULL) {
        tsr_status st = tsr_ckpt_read_member(b->list.ckpt, "assets/config.json", (size_t)64 << 20, &owned,
                                             &bytes, err);
        if (st != TSR_OK && st != TSR_E_MISSING) {
            return st;
        }
        json_t *config = json_object_get(b->manifest, "config");
        if (owned == NULL && json_is_object(config)) {
            owned = json_dumps(config, JSON_REAL_PRECISION(17));
            bytes = owned != NULL ? strlen(owned) : 0;
        }
        text = owned;
    } else {
        text = b->list.view.source->config_json;
        bytes = b->list.view.source->config_bytes;
    }
    tsr_spec *s = calloc(1, sizeof *s);
    tsr_err why;
    if (s != NULL && text != NULL) {
        tsr_status st = tsr_spec_parse(s, text, bytes, &why);
        if (st == TSR_OK) {
            tsr_json_set(&b->o, "model", model_facts(s));
        } else if (st == TSR_E_UNSUPPORTED) {
            tsr_cli_note(b->cli, "%s",
                         why.msg); /* another model's configuration: its tensors are listed all the same */
        } else {
            tsr_cli_warn(b->cli, "%s", why.msg);
        }
    }
    free(s);
    free(owned);
    return TSR_OK;
}

static tsr_status add_totals(about *b, tsr_err *err)
{
    uint64_t tensors = 0, bytes = 0;
    uint32_t experts = 0, families = 0;
    tsr_list_row *row = calloc(1, sizeof *row);
    tsr_status st = row != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    for (uint32_t i = 0; st == TSR_OK && i < b->list.count; i++) {
        st = tsr_list_get(&b->list, i, -1, false, row, err);
        if (st == TSR_OK && !tsr_add_u64(bytes, row->bytes, &bytes)) {
            st = TSR_ERR(err, TSR_E_FORMAT, "%s: sizes do not fit", row->name);
        }
        tensors += row->expert_count > 0 ? row->expert_count : 1;
        families += row->expert_count > 0;
        experts = row->expert_count > experts ? row->expert_count : experts;
    }
    free(row);
    TSR_TRY(st);
    tsr_json_set(&b->o, "tensors", tsr_json_u64(tensors));
    tsr_json_set(&b->o, "families", json_integer(families));
    tsr_json_set(&b->o, "experts", json_integer(experts));
    tsr_json_set(&b->o, "bytes", tsr_json_u64(bytes));
    json_t *stored = json_object_get(json_object_get(b->manifest, "totals"), "stored_bytes");
    if (json_is_integer(stored) && bytes > 0) {
        tsr_json_set(&b->o, "stored_bytes", json_incref(stored));
        tsr_json_set(&b->o, "ratio", tsr_json_number((double)json_integer_value(stored) / (double)bytes));
    }
    return TSR_OK;
}

static tsr_status ckpt_file(about *b, uint32_t i, json_t **list, tsr_err *err)
{
    tsr_file_info f;
    uint32_t *ids, count;
    char text[RANGES_BYTES];
    TSR_TRY(tsr_ckpt_file(b->list.ckpt, i, &f, err));
    TSR_TRY(tsr_ckpt_file_experts(b->list.ckpt, i, &ids, &count, err));
    json_t *o = json_object();
    tsr_json_set(&o, "name", tsr_json_text(f.name));
    tsr_json_set(&o, "bytes", tsr_json_u64(f.bytes));
    tsr_json_set(&o, "class", tsr_json_text(tsr_class_name(f.klass)));
    tsr_json_set(&o, "partition", json_integer(f.partition));
    tsr_json_set(&o, "of", json_integer(f.of));
    if (count > 0) {
        tsr_json_set(&o, "experts", tsr_json_text(tsr_ranges_of(ids, count, text, sizeof text)));
        tsr_json_set(&o, "expert_count", json_integer(count));
    }
    free(ids);
    tsr_json_append(list, o);
    tsr_err why;
    tsr_status st = tsr_ckpt_check_file(b->list.ckpt, i, &why);
    if (st != TSR_OK && b->late == TSR_OK) {
        b->late = st;
        b->late_err = why;
    }
    return TSR_OK;
}

static tsr_status add_files(about *b, tsr_err *err)
{
    json_t *list = json_array();
    uint64_t bytes = 0;
    tsr_status st = TSR_OK;
    if (b->list.ckpt != NULL) {
        for (uint32_t i = 0; st == TSR_OK && i < tsr_ckpt_file_count(b->list.ckpt); i++) {
            st = ckpt_file(b, i, &list, err);
        }
    } else {
        const tsr_source *s = b->list.view.source;
        for (int64_t i = 0; i < s->file_count; i++) {
            json_t *o = json_object();
            tsr_json_set(&o, "name", tsr_json_text(s->files[i].name));
            tsr_json_set(&o, "bytes", tsr_json_u64(s->files[i].bytes));
            tsr_json_append(&list, o);
        }
    }
    size_t i;
    json_t *f;
    json_array_foreach(list, i, f)
    {
        bytes += (uint64_t)json_integer_value(json_object_get(f, "bytes"));
    }
    tsr_json_set(&b->o, "file_bytes", tsr_json_u64(bytes));
    tsr_json_set(&b->o, "files", list);
    return st;
}

static void add_asset(json_t **list, const char *name, uint64_t bytes)
{
    json_t *o = json_object();
    tsr_json_set(&o, "name", tsr_json_text(name));
    tsr_json_set(&o, "bytes", tsr_json_u64(bytes));
    tsr_json_append(list, o);
}

static tsr_status take_member(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    (void)err;
    if (strncmp(name, "assets/", 7) == 0) {
        add_asset(payload, name + 7, size);
    }
    return TSR_OK;
}

static tsr_status add_assets(about *b, tsr_err *err)
{
    json_t *list = json_array();
    tsr_status st = TSR_OK;
    if (b->list.ckpt != NULL) {
        st = tsr_ckpt_each_member(b->list.ckpt, take_member, &list, err);
    } else {
        for (int64_t i = 0; i < b->list.view.source->asset_count; i++) {
            add_asset(&list, b->list.view.source->assets[i].name, b->list.view.source->assets[i].bytes);
        }
    }
    tsr_json_set(&b->o, "assets", list);
    return st;
}

/* Training state (train.json) is kept whole; its step is repeated at the top. */
static tsr_status add_history(about *b, tsr_err *err)
{
    static const char *const keys[] = { "uuid", "created", "tool", "partitions", "lineage" };
    char *text;
    size_t bytes;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        json_t *v = json_object_get(b->manifest, keys[i]);
        if (v != NULL) {
            tsr_json_set(&b->o, keys[i], json_incref(v));
        }
    }
    tsr_status st = tsr_ckpt_read_member(b->list.ckpt, "train.json", (size_t)64 << 20, &text, &bytes, err);
    if (st == TSR_E_MISSING) {
        return TSR_OK;
    }
    TSR_TRY(st);
    json_t *train = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    free(text);
    if (train == NULL) {
        tsr_cli_warn(b->cli, "train.json: is not JSON");
        return TSR_OK;
    }
    json_t *step = json_object_get(train, "step");
    if (step != NULL) {
        tsr_json_set(&b->o, "step", json_incref(step));
    }
    tsr_json_set(&b->o, "train", train);
    return TSR_OK;
}

static tsr_status gather(about *b, const char *path, tsr_err *err)
{
    b->o = json_object();
    tsr_json_set(&b->o, "path", tsr_json_text(path));
    tsr_json_set(&b->o, "format", tsr_json_text(b->list.what));
    if (b->list.ckpt != NULL) {
        size_t n;
        const char *text = tsr_ckpt_manifest(b->list.ckpt, &n);
        b->manifest = json_loadb(text, n, JSON_REJECT_DUPLICATES, NULL);
        tsr_json_set(&b->o, "checkpoint", tsr_json_text(tsr_ckpt_path(b->list.ckpt)));
    }
    tsr_json_set(&b->o, "arch", tsr_json_text(b->list.layout->arch));
    tsr_json_set(&b->o, "names", tsr_json_text(b->list.layout->what));
    TSR_TRY(add_model(b, err));
    TSR_TRY(add_totals(b, err));
    if (b->list.ckpt != NULL) {
        TSR_TRY(add_history(b, err));
    }
    TSR_TRY(add_files(b, err));
    return add_assets(b, err);
}

/* ---- printing
 * ---------------------------------------------------------------------------------------------- */

static const char *text_at(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s != NULL ? s : "";
}

static int64_t int_at(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static void line(const char *key, const char *text)
{
    (void)printf("%-12s ", key);
    tsr_out_text(stdout, text);
    (void)fputc('\n', stdout);
}

static void print_layers(const json_t *m)
{
    const json_t *kinds = json_object_get(m, "kinds"), *k;
    size_t i;
    (void)printf("%-12s %" PRId64, "layers", int_at(m, "layers"));
    if (json_array_size(kinds) > 0) {
        json_array_foreach(kinds, i, k)
        {
            (void)printf("%s layer %zu %s", i == 0 ? ":" : ",", i, json_string_value(k));
        }
        (void)fputc('\n', stdout);
        return;
    }
    (void)fputc('\n', stdout);
    (void)printf("%-12s %" PRId64 ": layers %s\n", "KDA", int_at(m, "kda_layer_count"),
                 text_at(m, "kda_layers"));
    (void)printf("%-12s %" PRId64 ": layers %s\n", "MLA", int_at(m, "mla_layer_count"),
                 text_at(m, "mla_layers"));
}

static void print_model(const json_t *m)
{
    print_layers(m);
    if (int_at(m, "first_dense") > 0) {
        (void)printf("%-12s layers below %" PRId64 "\n", "dense MLP", int_at(m, "first_dense"));
    }
    (void)printf("%-12s %" PRId64 " experts, top-k %" PRId64 ", %" PRId64 " shared\n", "routing",
                 int_at(m, "experts"), int_at(m, "top_k"), int_at(m, "shared_experts"));
    (void)printf("%-12s hidden %" PRId64 ", vocabulary %" PRId64 "\n", "width", int_at(m, "hidden"),
                 int_at(m, "vocab"));
    if (json_object_get(m, "params_total") != NULL) {
        (void)printf("%-12s %" PRId64 " (%" PRId64 " active)\n", "parameters", int_at(m, "params_total"),
                     int_at(m, "params_active"));
    }
}

static void print_history(const json_t *o)
{
    const json_t *v;
    size_t i;
    if ((v = json_object_get(o, "step")) != NULL) {
        (void)printf("%-12s %" PRId64 "\n", "step", (int64_t)json_integer_value(v));
    }
    json_array_foreach(json_object_get(o, "lineage"), i, v)
    {
        char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
        line(i == 0 ? "lineage" : "", text != NULL ? text : "");
        free(text);
    }
    if (text_at(o, "uuid")[0] != '\0') {
        line("uuid", text_at(o, "uuid"));
        line("created", text_at(o, "created"));
        line("by", text_at(o, "tool"));
    }
}

static void print_files(const json_t *o)
{
    const json_t *files = json_object_get(o, "files"), *f;
    size_t i;
    char size[TSR_SIZE_TEXT];
    (void)printf("%-12s %zu, %s\n", "files", json_array_size(files),
                 tsr_size_text((uint64_t)int_at(o, "file_bytes"), size));
    json_array_foreach(files, i, f)
    {
        (void)fputs("  ", stdout);
        tsr_out_text(stdout, text_at(f, "name"));
        const char *experts = text_at(f, "experts");
        (void)printf(": %s%s%s%s\n", experts[0] != '\0' ? "experts " : "", experts,
                     experts[0] != '\0' ? ", " : "", tsr_size_text((uint64_t)int_at(f, "bytes"), size));
    }
    files = json_object_get(o, "assets");
    (void)printf("%-12s %zu\n", "assets", json_array_size(files));
    json_array_foreach(files, i, f)
    {
        (void)fputs("  ", stdout);
        tsr_out_text(stdout, text_at(f, "name"));
        (void)printf(": %s\n", tsr_size_text((uint64_t)int_at(f, "bytes"), size));
    }
}

static void print_text(const json_t *o)
{
    char size[TSR_SIZE_TEXT];
    line("path", text_at(o, "path"));
    line("taken for", text_at(o, "format"));
    if (strcmp(text_at(o, "checkpoint"), "") != 0 &&
        strcmp(text_at(o, "checkpoint"), text_at(o, "path")) != 0) {
        line("checkpoint", text_at(o, "checkpoint"));
    }
    (void)printf("%-12s %s (%s)\n", "arch", text_at(o, "arch"), text_at(o, "names"));
    if (json_object_get(o, "model") != NULL) {
        print_model(json_object_get(o, "model"));
    }
    (void)printf("%-12s %" PRId64 " (%" PRId64 " families of up to %" PRId64 " experts)\n", "tensors",
                 int_at(o, "tensors"), int_at(o, "families"), int_at(o, "experts"));
    (void)printf("%-12s %s", "data", tsr_size_text((uint64_t)int_at(o, "bytes"), size));
    if (json_object_get(o, "stored_bytes") != NULL) {
        (void)printf(", stored in %s, ratio %.3f", tsr_size_text((uint64_t)int_at(o, "stored_bytes"), size),
                     json_real_value(json_object_get(o, "ratio")));
    }
    (void)fputc('\n', stdout);
    const json_t *p = json_object_get(o, "partitions"), *v;
    if (p != NULL) {
        const char *key;
        (void)printf("%-12s", "partitions");
        json_object_foreach((json_t *)(uintptr_t)p, key, v)
        {
            if (json_integer_value(v) > 0) {
                (void)printf(" %s %" PRId64, key, (int64_t)json_integer_value(v));
            }
        }
        (void)fputc('\n', stdout);
    }
    print_history(o);
    print_files(o);
}

static tsr_status run(tsr_cli *cli, const tsr_args *a, tsr_err *err)
{
    about b = { .cli = cli };
    TSR_TRY(tsr_list_open(&b.list, cli, a->operands[0], err));
    tsr_status st = gather(&b, a->operands[0], err);
    if (st == TSR_OK && b.o == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    if (st == TSR_OK && cli->json) {
        st = tsr_json_print(json_incref(b.o), false, err);
    } else if (st == TSR_OK) {
        print_text(b.o);
    }
    if (st == TSR_OK && b.late != TSR_OK) {
        st = b.late;
        *err = b.late_err;
    }
    json_decref(b.o);
    json_decref(b.manifest);
    tsr_list_close(&b.list);
    return st;
}

const tsr_cmd tsr_cmd_info = { .name = "info",
                               .what = "Say what a checkpoint is and holds",
                               .synopsis = synopsis,
                               .description = description,
                               .options = options,
                               .examples = examples,
                               .see_also = see_also,
                               .operand_min = 1,
                               .operand_max = 1,
                               .run = run };
