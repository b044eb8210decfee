/* fuzz_data.c - a data folder of hostile files. The input is five files, each behind its length (u16): data.json, train-00000.tok,
 * train-00000.idx, held-00000.tok and .idx. Checks of data.json and of heads are made right before it is opened, so that what lies
 * behind them is reached. */
#include "format/io.h"
#include "tests/fuzz/fuzz.h"
#include "train/data.h"
#include "train/data_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = { "data.json", "train-00000.tok", "train-00000.idx", "held-00000.tok",
                                     "held-00000.idx" };
static char dir[] = "/tmp/tsr-fuzz-data-XXXXXX";

static void leave(void)
{
    TSR_IGNORE(tsr_fs_remove_tree(dir, NULL)); /* nothing can be done about it */
}

static void put(const char *name, const void *p, size_t n)
{
    char path[100];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(p, 1, n, f) != n || fclose(f) != 0) {
        abort();
    }
}

/* Gives data.json the checks of what it says, where it is JSON at all. */
static char *mended(const uint8_t *p, size_t n)
{
    json_t *root = json_loadb((const char *)p, n, JSON_REJECT_DUPLICATES, NULL);
    uint64_t hash;
    char hex[DATA_HEX_BYTES], *text = NULL;
    data_meta m = { 0 };
    const json_t *splits = json_object_get(root, "splits");
    bool ok = json_is_object(root);
    m.vocab = json_integer_value(json_object_get(root, "vocab"));
    m.eos = (int32_t)json_integer_value(json_object_get(root, "eos"));
    for (int s = 0; ok && s < TSR_SPLIT_COUNT; s++) {
        ok = data_shards_parse(json_object_get(splits, tsr_split_name((tsr_split)s)), "x", (tsr_split)s,
                               false, &m.split[s], NULL) == TSR_OK;
    }
    if (ok && data_hash_of(&m, &hash, NULL) == TSR_OK) {
        data_hex(hash, hex);
        (void)json_object_set_new(root, "hash", json_string(hex));
        (void)json_object_del(root, "check");
        if (data_json_hash(root, &hash, NULL) == TSR_OK) {
            data_hex(hash, hex);
            (void)json_object_set_new(root, "check", json_string(hex));
            text = json_dumps(root, 0);
        }
    }
    data_meta_free(&m);
    json_decref(root);
    return text;
}

static void read_all(const tsr_data *d)
{
    for (int s = 0; s < TSR_SPLIT_COUNT; s++) {
        int64_t sum = 0;
        for (int64_t i = 0; i < tsr_data_docs(d, (tsr_split)s); i++) {
            int64_t n = tsr_data_doc_length(d, (tsr_split)s, i);
            int32_t *ids = n > 0 ? malloc((size_t)n * sizeof *ids) : NULL;
            if (ids == NULL) {
                abort();
            }
            tsr_data_copy(d, (tsr_split)s, i, 0, n, ids);
            free(ids);
            sum += n;
        }
        if (sum != tsr_data_tokens(d, (tsr_split)s)) {
            abort();
        }
        tsr_packed *p;
        if (tsr_packed_make(&p, d, (tsr_split)s, 5, NULL) == TSR_OK) {
            tsr_packed_free(&p);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool made;
    tsr_data *d;
    if (!made) {
        made = mkdtemp(dir) != NULL && atexit(leave) == 0;
        if (!made) {
            abort();
        }
    }
    for (size_t i = 0; i < 5; i++) {
        size_t n = size >= 2 ? (size_t)(data[0] | data[1] << 8) : 0;
        data += size >= 2 ? 2 : size;
        size -= size >= 2 ? 2 : size;
        n = n < size ? n : size;
        char *text = i == 0 ? mended(data, n) : NULL;
        uint8_t copy[1 << 16];
        memcpy(copy, data, n);
        if (i > 0 && n >= sizeof(data_head)) {
            data_head head;
            memcpy(&head, copy, sizeof head);
            head.head_hash = tsr_hash64(&head, offsetof(data_head, head_hash));
            memcpy(copy, &head, sizeof head);
        }
        put(names[i], text != NULL ? (const void *)text : copy, text != NULL ? strlen(text) : n);
        free(text);
        data += n;
        size -= n;
    }
    if (tsr_data_open(&d, dir, NULL) == TSR_OK) {
        TSR_IGNORE(tsr_data_verify(d, NULL, NULL)); /* only crashes matter */
        read_all(d);
        tsr_data_close(&d);
    }
    return 0;
}
