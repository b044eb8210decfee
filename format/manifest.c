/* manifest.c - manifest.json: what a checkpoint is. Written with jansson; it carries a check value of its own. */
#include "format/save.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define CHECK_KEY "\"manifest_xxh3\": \""

void uuid_new(uint8_t uuid[16])
{
    if (getrandom(uuid, 16, 0) != 16) { /* never on a running Linux; time keeps the ids apart all the same */
        struct timespec t;
        (void)clock_gettime(CLOCK_REALTIME, &t);
        tsr_hash128 h = tsr_hash_128(&t, sizeof t);
        memcpy(uuid, h.b, 16);
    }
    uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40);
    uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
}

void uuid_text(const uint8_t uuid[16], char out[37])
{
    size_t at = 0;
    for (int i = 0; i < 16; i++) {
        at += (size_t)snprintf(out + at, 37 - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                               uuid[i]);
    }
}

bool manifest_can_hold(const char *name)
{
    json_t *v = json_string(name); /* refuses what is not UTF-8 */
    json_decref(v);
    return v != NULL;
}

/* A JSON document somebody else wrote, kept whole; NULL text gives null. */
static tsr_status embed(json_t *root, const char *key, const char *text, tsr_err *err)
{
    if (text == NULL) {
        return json_object_set_new(root, key, json_null()) == 0 ? TSR_OK
                                                                : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    }
    json_t *v = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
    if (v ==
        NULL) { /* a config of somebody else's making: kept as text; its file is among the assets anyway */
        v = json_string(text);
        v = v != NULL ? v : json_null();
    }
    return json_object_set_new(root, key, v) == 0 ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
}

static json_t *file_entry(const save_file *f, const tsr_file_rec *r)
{
    char uuid[37], experts[1024], head[17];
    uuid_text(r->uuid, uuid);
    (void)snprintf(head, sizeof head, "%016llx", (unsigned long long)r->head_hash);
    json_t *o = json_pack("{s:s, s:s, s:I, s:s, s:s, s:i, s:i, s:i}", "name", f->name, "class",
                          tsr_class_name((unsigned)f->klass), "bytes", (json_int_t)r->file_bytes, "uuid",
                          uuid, "head_xxh3", head, "partition", (int)f->partition, "of", (int)f->of, "piece",
                          (int)f->piece);
    if (o != NULL && f->expert_count > 0) {
        tsr_ranges_text(f->experts, f->expert_count, experts, sizeof experts);
        if (json_object_set_new(o, "experts", json_string(experts)) != 0) {
            json_decref(o);
            return NULL;
        }
    }
    return o;
}

static json_t *members_entry(const manifest_in *in)
{
    json_t *list = json_array();
    for (uint32_t i = 0; list != NULL && i < in->member_count; i++) {
        char hex[33];
        tsr_hash128_hex(&in->members[i].hash, hex);
        if (json_array_append_new(list, json_pack("{s:s%, s:I, s:s}", "name", in->members[i].name,
                                                  strlen(in->members[i].name), "bytes",
                                                  (json_int_t)in->members[i].bytes, "xxh3", hex)) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *totals_entry(const manifest_in *in)
{
    const save_plan *p = in->plan;
    uint64_t names = 0, experts = 0;
    for (uint32_t i = 0; i < p->tensor_count; i++) {
        const tsr_tensor_decl *d = &p->tensors[i].d;
        names += d->expert_count > 0 ? d->expert_count : 1;
        experts = d->expert_count > experts ? d->expert_count : experts;
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "tensors", (json_int_t)names, "experts_per_layer",
                     (json_int_t)experts, "extents", (json_int_t)p->extent_count, "payload_bytes",
                     (json_int_t)p->payload_bytes, "stored_bytes", (json_int_t)in->stored_bytes);
}

static tsr_status fill_root(json_t *root, const manifest_in *in, tsr_err *err)
{
    char uuid[37], when[32];
    struct tm tm;
    time_t now = time(NULL);
    uuid_text(in->uuid, uuid);
    (void)strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    const tsr_save_opts *o = in->opts;
    json_t *files = json_array();
    bool ok = files != NULL;
    for (uint32_t i = 0; ok && i < in->plan->file_count; i++) {
        ok = json_array_append_new(files, file_entry(&in->plan->files[i], &in->files[i])) == 0;
    }
    uint32_t parts[TSR_CLASS_COUNT] = { 0 };
    for (uint32_t i = 0; i < in->plan->file_count; i++) {
        parts[in->plan->files[i].klass] = in->plan->files[i].of;
    }
    ok = ok && json_object_set_new(root, "format", json_string("tessera-checkpoint")) == 0 &&
         json_object_set_new(root, "version", json_integer(TSR_FORMAT_VERSION)) == 0 &&
         json_object_set_new(root, "features", json_array()) == 0 &&
         json_object_set_new(root, "uuid", json_string(uuid)) == 0 &&
         json_object_set_new(root, "created", json_string(when)) == 0 &&
         json_object_set_new(root, "tool", json_string("tessera " TSR_VERSION)) == 0 &&
         json_object_set_new(root, "arch", json_string(o->arch != NULL ? o->arch : "raw")) == 0 &&
         json_object_set_new(root, "totals", totals_entry(in)) == 0 &&
         json_object_set_new(root, "partitions",
                             json_pack("{s:i, s:i, s:i, s:i}", "dense", (int)parts[0], "experts",
                                       (int)parts[1], "optim-dense", (int)parts[2], "optim-experts",
                                       (int)parts[3])) == 0 &&
         json_object_set(root, "files", files) == 0 &&
         json_object_set_new(root, "members", members_entry(in)) == 0;
    json_decref(files);
    if (!ok) {
        TSR_FAIL(err, TSR_E_LIMIT, "manifest: out of memory, or a name is not UTF-8");
    }
    TSR_TRY(embed(root, "lineage", o->lineage_json != NULL ? o->lineage_json : "[]", err));
    TSR_TRY(embed(root, "config", o->config_json, err));
    if (json_object_set_new(root, "manifest_xxh3", json_string("00000000000000000000000000000000")) != 0) {
        TSR_FAIL(err, TSR_E_LIMIT, "manifest: out of memory");
    }
    return TSR_OK;
}

/* The 32 digits of the check value: behind the last occurrence of its key (a config may hold the same words). */
static char *check_digits(char *text, size_t bytes)
{
    char *at = NULL;
    const size_t n = sizeof CHECK_KEY - 1;
    for (size_t i = 0; i + n + 32 <= bytes; i++) {
        if (memcmp(text + i, CHECK_KEY, n) == 0) {
            at = text + i + n;
        }
    }
    return at;
}

tsr_status manifest_build(const manifest_in *in, char **text, size_t *bytes, tsr_err *err)
{
    *text = NULL;
    json_t *root = json_object();
    if (root == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "manifest: out of memory");
    }
    tsr_status st = fill_root(root, in, err);
    if (st == TSR_OK) {
        *text = json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
        st = *text != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "manifest: out of memory");
    }
    json_decref(root);
    TSR_TRY(st);
    *bytes = strlen(*text);
    char hex[33];
    tsr_hash128 h = tsr_hash_128(*text, *bytes);
    tsr_hash128_hex(&h, hex);
    char *digits = check_digits(*text, *bytes);
    TSR_ASSERT(digits != NULL);
    memcpy(digits, hex, 32);
    return TSR_OK;
}

bool manifest_intact(const char *text, size_t bytes)
{
    char *copy = malloc(bytes + 1);
    if (copy == NULL) {
        return false;
    }
    memcpy(copy, text, bytes);
    char had[33] = "", hex[33];
    char *digits = check_digits(copy, bytes);
    if (digits != NULL) {
        memcpy(had, digits, 32);
        memset(digits, '0', 32);
        tsr_hash128 h = tsr_hash_128(copy, bytes);
        tsr_hash128_hex(&h, hex);
    }
    free(copy);
    return digits != NULL && memcmp(had, hex, 32) == 0;
}
