/* export.c - writes the planned safetensors files. Work happens in a partial folder beside the destination; each
 * finished file has a note with its hash, so that a killed run goes on; the rename at the end makes it visible. */
#include "convert/convert_priv.h"
#include "convert/from_safetensors.h"
#include "format/io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE ((size_t)4 << 20)

typedef struct writer {
    conversion *c;
    char *real, *temp;
    int lock_fd;
    uint64_t done;
    uint8_t *buf;
} writer;

static char *in_temp(const writer *w, const char *name, const char *tail)
{
    char *out;
    return asprintf(&out, "%s/%s%s", w->temp, name, tail) >= 0 ? out : NULL;
}

static tsr_status advance(writer *w, uint64_t n, tsr_err *err)
{
    const tsr_progress *p = &w->c->o.progress;
    w->done += n;
    if (p->report != NULL) {
        p->report(p->payload, "write", w->done, w->c->pub.bytes_out);
    }
    if (p->cancel != NULL && *p->cancel != 0) {
        TSR_FAIL(err, TSR_E_CANCELLED, "%s: stopped; the same command continues it", w->real);
    }
    return TSR_OK;
}

/* ---- one file -------------------------------------------------------------------------------------------------------- */

static tsr_status write_data(writer *w, const out_file *o, const uint8_t *header, const out_entry *entries,
                             tsr_file *f, tsr_hasher *h, tsr_err *err)
{
    TSR_TRY(tsr_file_pwrite(f, header, o->header_bytes, 0, err));
    tsr_hasher_add(h, header, o->header_bytes);
    for (int64_t i = 0; i < o->count; i++) {
        const out_entry *e = &entries[i];
        for (uint64_t at = e->begin; at < e->end;) {
            size_t n = e->end - at < PIECE ? (size_t)(e->end - at) : PIECE;
            TSR_TRY(tsr_map_read(w->c->map, e->item, at - e->begin, w->buf, n, err));
            TSR_TRY(tsr_file_pwrite(f, w->buf, n, o->header_bytes + at, err));
            tsr_hasher_add(h, w->buf, n);
            tsr_file_writeback(f, o->header_bytes + at, n);
            at += n;
            TSR_TRY(advance(w, n, err));
        }
    }
    return tsr_file_sync(f, err);
}

/* An earlier run finished this file: its note's hash still fits. */
static bool is_finished(writer *w, const out_file *o, const char *path, const char *note)
{
    char text[33] = "", hex[33];
    tsr_io *io = NULL, *n = NULL;
    bool good = tsr_io_open_file(&n, note, NULL) == TSR_OK && n->size == 32 &&
                tsr_io_pread(n, text, 32, 0, NULL) == TSR_OK && tsr_io_open_file(&io, path, NULL) == TSR_OK &&
                io->size == o->header_bytes + o->data_bytes;
    tsr_hasher *h = good ? tsr_hasher_new128() : NULL;
    for (uint64_t at = 0; h != NULL && good && at < io->size; at += PIECE) {
        size_t len = io->size - at < PIECE ? (size_t)(io->size - at) : PIECE;
        good = tsr_io_pread(io, w->buf, len, at, NULL) == TSR_OK;
        tsr_hasher_add(h, w->buf, len);
    }
    if (h != NULL && good) {
        tsr_hash128 d = tsr_hasher_digest128(h);
        tsr_hash128_hex(&d, hex);
        good = memcmp(hex, text, 32) == 0;
    }
    tsr_hasher_free(&h);
    tsr_io_close(&io);
    tsr_io_close(&n);
    return good;
}

static tsr_status write_file(writer *w, const out_file *o, tsr_err *err)
{
    char *path = in_temp(w, o->name, ""), *part = in_temp(w, o->name, ".part"),
         *note = in_temp(w, o->name, ".done");
    tsr_file *f = NULL;
    uint8_t *header = NULL;
    out_entry *entries = NULL;
    tsr_hasher *h = tsr_hasher_new128();
    tsr_status st = path != NULL && part != NULL && note != NULL && h != NULL
                        ? TSR_OK
                        : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st != TSR_OK) {
        goto out;
    }
    if (tsr_fs_exists(path) && is_finished(w, o, path, note)) {
        st = advance(w, o->data_bytes, err);
        goto out;
    }
    TSR_GO(tsr_fs_remove_tree(path, err));
    TSR_GO(tsr_fs_remove_tree(note, err));
    TSR_GO(tsr_fs_remove_tree(part, err));
    if (o->header == NULL) {
        uint64_t bytes;
        TSR_GO(export_header(w->c, o, &header, &bytes, &entries, err));
        TSR_ASSERT(bytes == o->header_bytes); /* as planned */
    }
    TSR_GO(tsr_file_create(&f, part, err));
    TSR_GO(write_data(w, o, o->header != NULL ? o->header : header, o->entries != NULL ? o->entries : entries,
                      f, h, err));
    char hex[33];
    tsr_hash128 d = tsr_hasher_digest128(h);
    tsr_hash128_hex(&d, hex);
    TSR_GO(tsr_fs_rename(part, path, err));
    st = tsr_fs_write_file(note, hex, 32, err);
out:
    tsr_file_close(&f);
    tsr_hasher_free(&h);
    free(header);
    free(entries);
    free(path);
    free(part);
    free(note);
    return st;
}

/* ---- assets ------------------------------------------------------------------------------------------------------------ */

static tsr_status write_asset(writer *w, int64_t i, tsr_err *err)
{
    tsr_source *s = w->c->source;
    const tsr_src_asset *a = &s->assets[i];
    char *path = in_temp(w, a->name, ""), *text = NULL;
    tsr_io *io = NULL;
    tsr_status st = path != NULL ? TSR_OK : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        char *slash = strrchr(path, '/');
        *slash = '\0';
        st = tsr_fs_mkdirs(path, err);
        *slash = '/';
    }
    if (st == TSR_OK) {
        st = tsr_fs_remove_tree(path, err); /* of an interrupted run */
    }
    if (st == TSR_OK && a->path == NULL && a->data == NULL) {
        st = s->ops->read_asset(s, i, &text, err);
        if (st == TSR_OK) {
            st = tsr_fs_write_file(path, text, a->bytes, err);
        }
    } else if (st == TSR_OK && a->path == NULL) {
        st = tsr_fs_write_file(path, a->data, a->bytes, err);
    } else if (st == TSR_OK) {
        st = tsr_io_open_file(&io, a->path, err);
        const uint8_t *map = st == TSR_OK ? tsr_io_map(io) : NULL;
        if (st == TSR_OK) {
            st = map != NULL || io->size == 0
                     ? tsr_fs_write_file(path, map != NULL ? (const void *)map : "", io->size, err)
                     : TSR_ERR(err, TSR_E_IO, "%s: cannot be mapped", a->path);
        }
    }
    tsr_io_close(&io);
    free(text);
    free(path);
    return st;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && strcmp(s + n - t, tail) == 0;
}

/* model.safetensors.index.json, in file order; made in pieces, since it may name half a million tensors. */
static tsr_status write_index(writer *w, tsr_err *err)
{
    const conversion *c = w->c;
    char *path = in_temp(w, "model.safetensors.index.json", ""), *text = NULL, name[4400];
    size_t n = 0;
    uint64_t total = 0, at = 0;
    tsr_file *f = NULL;
    tsr_status st = path != NULL ? tsr_fs_remove_tree(path, err) : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        st = tsr_file_create(&f, path, err);
    }
    for (uint32_t k = 0; k < c->file_count; k++) {
        total += c->files[k].data_bytes;
    }
    for (uint32_t k = 0; st == TSR_OK && k < c->file_count; k++) {
        FILE *m = open_memstream(&text, &n);
        if (m == NULL) {
            st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
            break;
        }
        if (k == 0) {
            (void)fprintf(m, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
                          (unsigned long long)total);
        }
        for (int64_t i = 0; st == TSR_OK && i < c->files[k].count; i++) {
            st = export_name(c, c->files[k].first + i, name, sizeof name, err);
            (void)fputs(k == 0 && i == 0 ? "\n    " : ",\n    ", m);
            export_json_text(m, name);
            (void)fprintf(m, ": \"%s\"", c->files[k].name);
        }
        (void)fputs(k + 1 == c->file_count ? "\n  }\n}\n" : "", m);
        bool whole = fclose(m) == 0;
        if (st == TSR_OK) {
            st = whole ? tsr_file_pwrite(f, text, n, at, err) : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        }
        at += n;
        free(text);
    }
    if (st == TSR_OK) {
        st = tsr_file_sync(f, err);
    }
    tsr_file_close(&f);
    free(path);
    return st;
}

static tsr_status write_assets(writer *w, tsr_err *err)
{
    const conversion *c = w->c;
    for (int64_t i = 0; i < c->source->asset_count; i++) {
        const char *name = c->source->assets[i].name;
        bool old_index = ends_with(name, ".safetensors.index.json") && strchr(name, '/') == NULL &&
                         !c->pub.identical_files;
        if (strcmp(name, ST_HEADERS_ASSET) == 0 || old_index) {
            continue;
        }
        TSR_TRY(write_asset(w, i, err));
    }
    return !c->pub.identical_files && c->file_count > 1 ? write_index(w, err) : TSR_OK;
}

/* ---- all --------------------------------------------------------------------------------------------------------------- */

static tsr_status check_space(const writer *w, tsr_err *err)
{
    uint64_t have, need = w->c->pub.bytes_out + ((uint64_t)w->c->file_count + 1) * 8192, done = 0;
    for (uint32_t i = 0; i < w->c->file_count; i++) {
        char *path = in_temp(w, w->c->files[i].name, "");
        if (path != NULL && tsr_fs_exists(path)) {
            done += w->c->files[i].data_bytes;
        }
        free(path);
    }
    need = need > done ? need - done : 0;
    TSR_TRY(tsr_fs_free_bytes(w->temp, &have, err));
    if (have < need) {
        TSR_FAIL(err, TSR_E_IO,
                 "%s: No space left on device: need %llu bytes, %llu free (free some space and run the same"
                 " command again)",
                 w->real, (unsigned long long)need, (unsigned long long)have);
    }
    return TSR_OK;
}

static tsr_status enter(writer *w, tsr_err *err)
{
    const char *key;
    char *lock, *note = NULL;
    tsr_status st = TSR_OK;
    TSR_TRY(convert_key(w->c, &key, err));
    lock = in_temp(w, "lock", "");
    note = in_temp(w, "resume.txt", "");
    if (lock == NULL || note == NULL) {
        st = TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        goto out;
    }
    if (w->c->o.restart) {
        TSR_GO(tsr_fs_remove_tree(w->temp, err));
    }
    TSR_GO(tsr_fs_mkdirs(w->temp, err));
    TSR_GO(tsr_fs_lock(lock, &w->lock_fd, err));
    st = tsr_fs_check_note(note, key, w->real, w->temp, err);
    if (st == TSR_E_MISSING) {
        st = tsr_fs_replace_file(note, key, strlen(key), err); /* whole or not at all */
    }
out:
    free(lock);
    free(note);
    return st;
}

static tsr_status leave_clean(writer *w, tsr_err *err)
{
    for (uint32_t i = 0; i < w->c->file_count; i++) {
        char *note = in_temp(w, w->c->files[i].name, ".done");
        tsr_status st = note != NULL ? tsr_fs_remove_tree(note, err)
                                     : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        free(note);
        TSR_TRY(st);
    }
    static const char *const own[] = { "resume.txt", "lock" };
    for (int i = 0; i < 2; i++) {
        char *path = in_temp(w, own[i], "");
        tsr_status st = path != NULL ? tsr_fs_remove_tree(path, err)
                                     : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
        free(path);
        TSR_TRY(st);
    }
    return tsr_fs_sync_dir(w->temp, err);
}

static tsr_status publish(writer *w, tsr_err *err)
{
    if (w->c->single) { /* the one file moves out, the folder goes */
        char *path = in_temp(w, w->c->files[0].name, "");
        if (path == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        tsr_status st = tsr_fs_rename_new(path, w->real, err);
        free(path);
        TSR_TRY(st);
        return tsr_fs_remove_tree(w->temp, err);
    }
    return tsr_fs_exists(w->real) ? tsr_fs_rename(w->temp, w->real, err)
                                  : tsr_fs_rename_new(w->temp, w->real, err);
}

static tsr_status run(writer *w, tsr_err *err)
{
    TSR_TRY(enter(w, err));
    TSR_TRY(check_space(w, err));
    for (uint32_t i = 0; i < w->c->file_count; i++) {
        TSR_TRY(write_file(w, &w->c->files[i], err));
    }
    if (!w->c->single) {
        TSR_TRY(write_assets(w, err));
    }
    TSR_TRY(leave_clean(w, err));
    return publish(w, err);
}

tsr_status export_run(conversion *c, tsr_err *err)
{
    writer w = { .c = c, .lock_fd = -1, .buf = malloc(PIECE) };
    tsr_status st = w.buf != NULL ? tsr_fs_target(c->dst, true, &w.real, &w.temp, err)
                                  : TSR_ERR(err, TSR_E_LIMIT, "out of memory");
    if (st == TSR_OK) {
        st = run(&w, err);
        if (st != TSR_OK && st != TSR_E_CANCELLED && st != TSR_E_CONFLICT) {
            TSR_IGNORE(tsr_fs_remove_tree(w.temp, NULL)); /* the failure matters more */
        }
    }
    tsr_fs_unlock(&w.lock_fd);
    free(w.real);
    free(w.temp);
    free(w.buf);
    return st;
}
