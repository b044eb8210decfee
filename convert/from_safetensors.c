/* from_safetensors.c - one .safetensors file, or a folder of shards with or without an index, as a source. */
#include "convert/from_safetensors.h"
#include "convert/st_header.h"
#include "convert/st_index.h"
#include "format/io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_MEM_LIMIT ((uint64_t)256 << 20)
#define CONFIG_BYTES_MAX ((size_t)64 << 20)

typedef struct st_file {
    tsr_io *io;
    uint64_t data_start;
} st_file;

typedef struct st_source {
    tsr_source pub; /* first */
    tsr_arena *arena;
    tsr_source_opts opts;
    tsr_dir *dir;   /* NULL for a single file */
    st_file *parts; /* beside pub.files */
    tsr_src_file *names;
    uint32_t part_count, part_room;
    tsr_src_tensor *tensors;
    int64_t tensor_room;
    tsr_src_asset *assets;
    int64_t asset_room;
    const char **warnings;
    int64_t warning_room;
    char *config;
    const char *index_name;
    /* names of all tensors: open-addressed, number + 1 */
    uint32_t *hash;
    uint64_t hash_size;
    uint8_t *in_index;
} st_source;

static tsr_status no_memory(const st_source *s, tsr_err *err)
{
    TSR_FAIL(err, TSR_E_LIMIT, "%s: its list of tensors needs more memory than allowed (--mem-limit)",
             s->pub.path);
}

/* list grows by doubling inside the arena; the old halves are left behind. */
static void *grow(tsr_arena *a, void *list, int64_t count, int64_t *room, size_t each)
{
    if (count < *room) {
        return list;
    }
    int64_t more = *room * 2 + 16;
    void *grown = tsr_arena_alloc(a, (size_t)more * each);
    if (grown != NULL) {
        if (count > 0) {
            memcpy(grown, list, (size_t)count * each);
        }
        *room = more;
    }
    return grown;
}

static tsr_status warn(st_source *s, const char *text, tsr_err *err)
{
    s->warnings = grow(s->arena, (void *)s->warnings, s->pub.warning_count, &s->warning_room,
                       sizeof *s->warnings);
    const char *copy = tsr_arena_strndup(s->arena, text, strlen(text));
    if (s->warnings == NULL || copy == NULL) {
        return no_memory(s, err);
    }
    s->warnings[s->pub.warning_count++] = copy;
    return TSR_OK;
}

/* ---- one shard ------------------------------------------------------------------------------------------------ */

static tsr_status add_tensors(st_source *s, const st_header *h, uint32_t file, uint64_t data_start,
                              tsr_err *err)
{
    for (int64_t i = 0; i < h->count; i++) {
        const st_entry *e = &h->entries[i];
        s->tensors = grow(s->arena, s->tensors, s->pub.count, &s->tensor_room, sizeof *s->tensors);
        if (s->tensors == NULL) {
            return no_memory(s, err);
        }
        s->tensors[s->pub.count++] = (tsr_src_tensor){ .name = e->name,
                                                       .shape = e->shape,
                                                       .bytes = e->end - e->begin,
                                                       .offset = data_start + e->begin,
                                                       .file = file,
                                                       .dtype = e->dtype,
                                                       .rank = e->rank };
    }
    return TSR_OK;
}

/* Opens the shard io (taken over) and reads its header. */
static tsr_status add_shard(st_source *s, const char *name, tsr_io *io, tsr_err *err)
{
    int64_t room = s->part_room;
    s->names = grow(s->arena, s->names, s->part_count, &room, sizeof *s->names);
    room = s->part_room;
    s->parts = grow(s->arena, s->parts, s->part_count, &room, sizeof *s->parts);
    if (s->names == NULL || s->parts == NULL) {
        tsr_io_close(&io);
        return no_memory(s, err);
    }
    s->part_room = (uint32_t)room;
    uint32_t file = s->part_count++;
    s->parts[file].io = io;
    s->names[file] = (tsr_src_file){ tsr_arena_strndup(s->arena, name, strlen(name)), io->size };
    uint8_t first[512];
    size_t n = io->size < sizeof first ? (size_t)io->size : sizeof first;
    uint64_t header_bytes;
    st_header h;
    TSR_TRY(tsr_io_pread(io, first, n, 0, err));
    TSR_TRY(st_header_length(io->name, first, n, io->size, &header_bytes, err));
    const uint8_t *map = tsr_io_map(io);
    uint8_t *copy = NULL;
    if (map == NULL) {
        copy = malloc(header_bytes);
        if (copy == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory for its header", io->name);
        }
        tsr_status st = tsr_io_pread(io, copy, header_bytes, 8, err);
        if (st != TSR_OK) {
            free(copy);
            return st;
        }
    }
    s->parts[file].data_start = 8 + header_bytes;
    tsr_status st = st_header_parse(&h, s->arena, io->name, map != NULL ? map + 8 : copy, header_bytes,
                                    io->size - 8 - header_bytes, s->opts.allow_trailing, err);
    free(copy);
    TSR_TRY(st);
    if (h.trailing > 0) {
        char text[1200];
        (void)snprintf(text, sizeof text, "%.900s: %llu trailing bytes are ignored", io->name,
                       (unsigned long long)h.trailing);
        TSR_TRY(warn(s, text, err));
    }
    return add_tensors(s, &h, file, 8 + header_bytes, err);
}

/* ---- names ----------------------------------------------------------------------------------------------------- */

static tsr_status hash_names(st_source *s, tsr_err *err)
{
    s->hash_size = 16;
    while (s->hash_size < (uint64_t)s->pub.count * 2) {
        s->hash_size *= 2;
    }
    s->hash = calloc(s->hash_size, sizeof *s->hash);
    s->in_index = calloc((size_t)s->pub.count + 1, 1);
    if (s->hash == NULL || s->in_index == NULL) {
        return no_memory(s, err);
    }
    for (int64_t i = 0; i < s->pub.count; i++) {
        const tsr_src_tensor *t = &s->tensors[i];
        uint64_t slot = tsr_hash64(t->name, strlen(t->name)) & (s->hash_size - 1);
        for (; s->hash[slot] != 0; slot = (slot + 1) & (s->hash_size - 1)) {
            const tsr_src_tensor *o = &s->tensors[s->hash[slot] - 1];
            if (strcmp(o->name, t->name) == 0) {
                TSR_FAIL(err, TSR_E_CONFLICT, "%s: %s: is in %s and in %s", s->pub.path, t->name,
                         s->names[o->file].name, s->names[t->file].name);
            }
        }
        s->hash[slot] = (uint32_t)i + 1;
    }
    return TSR_OK;
}

static int64_t find_name(const st_source *s, const char *name)
{
    for (uint64_t slot = tsr_hash64(name, strlen(name)) & (s->hash_size - 1); s->hash[slot] != 0;
         slot = (slot + 1) & (s->hash_size - 1)) {
        if (strcmp(s->tensors[s->hash[slot] - 1].name, name) == 0) {
            return (int64_t)s->hash[slot] - 1;
        }
    }
    return -1;
}

/* ---- index -------------------------------------------------------------------------------------------------------- */

typedef struct shard_list {
    st_source *s;
    const char **names; /* unique, in order of first mention */
    int64_t count, room;
} shard_list;

static tsr_status collect_shard(void *payload, const char *tensor, const char *shard, tsr_err *err)
{
    (void)tensor;
    shard_list *l = payload;
    for (int64_t i = l->count; i-- > 0;) { /* neighbours share a shard: found at once */
        if (strcmp(l->names[i], shard) == 0) {
            return TSR_OK;
        }
    }
    if (l->count >= 65536) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: names more than 65536 shards", l->s->index_name);
    }
    l->names = grow(l->s->arena, (void *)l->names, l->count, &l->room, sizeof *l->names);
    const char *copy = tsr_arena_strndup(l->s->arena, shard, strlen(shard));
    if (l->names == NULL || copy == NULL) {
        return no_memory(l->s, err);
    }
    l->names[l->count++] = copy;
    return TSR_OK;
}

static tsr_status check_entry(void *payload, const char *tensor, const char *shard, tsr_err *err)
{
    st_source *s = payload;
    int64_t i = find_name(s, tensor);
    if (i < 0 || strcmp(s->names[s->tensors[i].file].name, shard) != 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: %s: the index promises it in %s, which does not hold it",
                 s->index_name, tensor, shard);
    }
    if (s->in_index[i]) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s: duplicate key", s->index_name, tensor);
    }
    s->in_index[i] = 1;
    return TSR_OK;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Every shard is there, before anything else is read. */
static tsr_status check_shards(st_source *s, shard_list *l, tsr_err *err)
{
    char missing[700] = "";
    size_t used = 0;
    int64_t gone = 0;
    qsort(l->names, (size_t)l->count, sizeof *l->names, by_text);
    for (int64_t i = 0; i < l->count; i++) {
        uint64_t size;
        tsr_status st = s->dir->ops->size(s->dir, l->names[i], &size, err);
        bool dangling = st == TSR_E_MISSING && err != NULL && strstr(err->msg, "is a link to") != NULL;
        if (st != TSR_OK && (st != TSR_E_MISSING || dangling)) {
            return st;
        }
        if (st == TSR_E_MISSING) {
            gone++;
            if (gone <= 6) {
                used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%.100s",
                                         gone > 1 ? ", " : "", l->names[i]);
            }
        }
    }
    if (gone > 6) {
        (void)snprintf(missing + used, sizeof missing - used, " and %lld more", (long long)(gone - 6));
    }
    if (gone > 0) {
        TSR_FAIL(err, TSR_E_MISSING, "%s: %lld of %lld shards missing: %s (download them again)", s->pub.path,
                 (long long)gone, (long long)l->count, missing);
    }
    return TSR_OK;
}

/* Tensors the index does not know are dropped, and told. */
static tsr_status drop_unlisted(st_source *s, tsr_err *err)
{
    int64_t kept = 0, dropped = 0;
    char text[700];
    size_t used = 0;
    for (int64_t i = 0; i < s->pub.count; i++) {
        if (s->in_index[i]) {
            s->tensors[kept++] = s->tensors[i];
        } else if (dropped++ < 3) {
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%.180s", dropped > 1 ? ", " : "",
                                     s->tensors[i].name);
        }
    }
    s->pub.count = kept;
    if (dropped > 0) {
        char line[900];
        (void)snprintf(line, sizeof line, "%lld tensor%s not in the index %s ignored: %s%s",
                       (long long)dropped, dropped > 1 ? "s" : "", dropped > 1 ? "are" : "is", text,
                       dropped > 3 ? ", ..." : "");
        return warn(s, line, err);
    }
    return TSR_OK;
}

static tsr_status open_indexed(st_source *s, const char *index, tsr_err *err)
{
    tsr_io *io = NULL, *part;
    shard_list l = { .s = s };
    tsr_status st;
    uint8_t *copy = NULL;
    TSR_TRY(s->dir->ops->open(s->dir, index, &io, err));
    s->index_name = tsr_arena_strndup(s->arena, io->name, strlen(io->name));
    const uint8_t *text = tsr_io_map(io);
    if (s->index_name == NULL || (text == NULL && io->size > 0)) {
        st = no_memory(s, err);
        goto out;
    }
    TSR_GO(st_index_each(s->index_name, text, io->size, collect_shard, &l, err));
    TSR_GO(check_shards(s, &l, err));
    for (int64_t i = 0; i < l.count; i++) {
        TSR_GO(s->dir->ops->open(s->dir, l.names[i], &part, err));
        TSR_GO(add_shard(s, l.names[i], part, err));
    }
    TSR_GO(hash_names(s, err));
    TSR_GO(st_index_each(s->index_name, text, io->size, check_entry, s, err));
    st = drop_unlisted(s, err);
out:
    free(copy);
    tsr_io_close(&io);
    return st;
}

/* ---- folder ------------------------------------------------------------------------------------------------------- */

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);
    return n >= t && strcmp(s + n - t, tail) == 0;
}

typedef struct listing {
    st_source *s;
    const char *index; /* the one *.safetensors.index.json */
    const char **shards;
    int64_t shard_count, shard_room;
} listing;

static tsr_status take_file(void *payload, const char *name, uint64_t size, tsr_err *err)
{
    listing *l = payload;
    st_source *s = l->s;
    if (name[0] == '.' || strstr(name, "/.") != NULL) {
        return TSR_OK; /* .git and the like */
    }
    const char *copy = tsr_arena_strndup(s->arena, name, strlen(name));
    if (copy == NULL) {
        return no_memory(s, err);
    }
    bool top = strchr(name, '/') == NULL;
    if (top && ends_with(name, ".safetensors")) {
        l->shards = grow(s->arena, (void *)l->shards, l->shard_count, &l->shard_room, sizeof *l->shards);
        if (l->shards == NULL) {
            return no_memory(s, err);
        }
        l->shards[l->shard_count++] = copy;
        return TSR_OK;
    }
    if (top && ends_with(name, ".safetensors.index.json")) {
        if (l->index != NULL) {
            TSR_FAIL(err, TSR_E_CONFLICT,
                     "%s: has two indexes, %s and %s (give the path of the one you mean)", s->pub.path,
                     l->index, name);
        }
        l->index = copy;
    }
    char *path;
    if (asprintf(&path, "%s/%s", s->dir->path, name) < 0) {
        return no_memory(s, err);
    }
    s->assets = grow(s->arena, s->assets, s->pub.asset_count, &s->asset_room, sizeof *s->assets);
    const char *kept = tsr_arena_strndup(s->arena, path, strlen(path));
    free(path);
    if (s->assets == NULL || kept == NULL) {
        return no_memory(s, err);
    }
    s->assets[s->pub.asset_count++] = (tsr_src_asset){ copy, kept, NULL, size };
    return TSR_OK;
}

/* Shards beside the index's list stay behind; they are told, since somebody put them there. */
static tsr_status warn_stray(st_source *s, const listing *l, tsr_err *err)
{
    for (int64_t i = 0; i < l->shard_count; i++) {
        bool used = false;
        for (uint32_t k = 0; !used && k < s->part_count; k++) {
            used = strcmp(s->names[k].name, l->shards[i]) == 0;
        }
        if (!used) {
            char text[600];
            (void)snprintf(text, sizeof text, "%.400s is not in the index and is ignored", l->shards[i]);
            TSR_TRY(warn(s, text, err));
        }
    }
    return TSR_OK;
}

static tsr_status open_folder(st_source *s, const char *index, tsr_err *err)
{
    listing l = { .s = s };
    TSR_TRY(s->dir->ops->each(s->dir, take_file, &l, err));
    index = index != NULL ? index : l.index;
    if (index != NULL) {
        s->pub.what = "safetensors folder with index";
        TSR_TRY(open_indexed(s, index, err));
        TSR_TRY(warn_stray(s, &l, err));
    } else {
        if (l.shard_count == 0) {
            TSR_FAIL(err, TSR_E_MISSING, "%s: holds no .safetensors file", s->pub.path);
        }
        for (int64_t i = 0; i < l.shard_count; i++) {
            tsr_io *io;
            TSR_TRY(s->dir->ops->open(s->dir, l.shards[i], &io, err));
            TSR_TRY(add_shard(s, l.shards[i], io, err));
        }
        TSR_TRY(hash_names(s, err));
    }
    tsr_status st = tsr_dir_read(s->dir, "config.json", CONFIG_BYTES_MAX, &s->config, &s->pub.config_bytes,
                                 err);
    s->pub.config_json = s->config;
    return st == TSR_E_MISSING ? TSR_OK : st;
}

static tsr_status open_path(st_source *s, const char *path, tsr_err *err)
{
    if (tsr_fs_is_dir(path)) {
        TSR_TRY(tsr_dir_open_posix(&s->dir, path, err));
        return open_folder(s, NULL, err);
    }
    const char *slash = strrchr(path, '/');
    const char *base = slash != NULL ? slash + 1 : path;
    if (ends_with(path, ".index.json")) {
        char *dir = slash != NULL ? strndup(path, (size_t)(slash - path)) : strdup(".");
        tsr_status st = dir != NULL ? tsr_dir_open_posix(&s->dir, dir, err) : no_memory(s, err);
        free(dir);
        return st == TSR_OK ? open_folder(s, base, err) : st;
    }
    tsr_io *io;
    s->pub.what = "single safetensors file";
    TSR_TRY(tsr_io_open_file(&io, path, err));
    TSR_TRY(add_shard(s, base, io, err));
    return hash_names(s, err);
}

/* ---- the source ------------------------------------------------------------------------------------------------------ */

static void st_close(tsr_source *pub)
{
    st_source *s = (st_source *)(void *)pub;
    for (uint32_t i = 0; i < s->part_count; i++) {
        tsr_io_close(&s->parts[i].io);
    }
    tsr_dir_close(&s->dir);
    free(s->config);
    free(s->hash);
    free(s->in_index);
    tsr_arena_free(&s->arena);
    free(s);
}

static tsr_status st_open(tsr_source **out, const char *path, const tsr_source_opts *o, tsr_err *err)
{
    *out = NULL;
    st_source *s = calloc(1, sizeof *s);
    if (s == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->opts = *o;
    s->arena = tsr_arena_new(o->mem_limit > 0 ? o->mem_limit : DEFAULT_MEM_LIMIT);
    s->pub.path = s->arena != NULL ? tsr_arena_strndup(s->arena, path, strlen(path)) : NULL;
    if (s->pub.path == NULL) {
        tsr_arena_free(&s->arena);
        free(s);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->pub.ops = &tsr_source_safetensors;
    s->pub.what = "safetensors folder";
    tsr_status st = open_path(s, path, err);
    if (st != TSR_OK) {
        st_close(&s->pub);
        return st;
    }
    s->pub.tensors = s->tensors;
    s->pub.files = s->names;
    s->pub.file_count = s->part_count;
    s->pub.assets = s->assets;
    s->pub.warnings = s->warnings;
    *out = &s->pub;
    return TSR_OK;
}

static tsr_status st_read(tsr_source *pub, int64_t i, uint64_t off, void *dst, size_t n, tsr_err *err)
{
    const st_source *s = (const st_source *)(const void *)pub;
    const tsr_src_tensor *t = &s->tensors[i];
    return tsr_io_pread(s->parts[t->file].io, dst, n, t->offset + off, err);
}

static tsr_status st_read_range(tsr_source *pub, uint32_t file, uint64_t off, void *dst, size_t n,
                                tsr_err *err)
{
    const st_source *s = (const st_source *)(const void *)pub;
    TSR_ASSERT(file < s->part_count);
    return tsr_io_pread(s->parts[file].io, dst, n, off, err);
}

static bool folder_has(const char *path, const char *tail)
{
    tsr_source_opts o = { 0 };
    st_source s = { .opts = o, .arena = tsr_arena_new(0) };
    listing l = { .s = &s };
    bool yes = false;
    if (s.arena != NULL && tsr_dir_open_posix(&s.dir, path, NULL) == TSR_OK) {
        s.pub.path = path;
        (void)tail;
        tsr_status st = s.dir->ops->each(s.dir, take_file, &l, NULL);
        yes = l.shard_count > 0 || l.index != NULL || st == TSR_E_MISSING;
    }
    tsr_dir_close(&s.dir);
    tsr_arena_free(&s.arena);
    return yes;
}

static int st_bid(const char *path)
{
    if (tsr_fs_is_dir(path)) {
        return folder_has(path, ".safetensors") ? 50 : 0;
    }
    return ends_with(path, ".safetensors") || ends_with(path, ".safetensors.index.json") ? 90 : 0;
}

const tsr_source_ops tsr_source_safetensors = { .name = "safetensors",
                                                .what = "safetensors folder",
                                                .bid = st_bid,
                                                .open = st_open,
                                                .read = st_read,
                                                .close = st_close,
                                                .read_range = st_read_range };

tsr_status st_source_headers(tsr_source *pub, uint8_t **out, uint64_t *bytes, tsr_err *err)
{
    const st_source *s = (const st_source *)(const void *)pub;
    uint64_t total = 0;
    for (uint32_t i = 0; i < s->part_count; i++) {
        total += 4 + strlen(s->names[i].name) + 8 + s->parts[i].data_start;
    }
    uint8_t *buf = malloc(total + 1), *p = buf;
    *out = NULL;
    if (buf == NULL) {
        return no_memory(s, err);
    }
    for (uint32_t i = 0; i < s->part_count; i++) {
        uint32_t n = (uint32_t)strlen(s->names[i].name);
        memcpy(p, &n, 4);
        memcpy(p + 4, s->names[i].name, n);
        memcpy(p + 4 + n, &s->parts[i].data_start, 8);
        p += 4 + n + 8;
        tsr_status st = tsr_io_pread(s->parts[i].io, p, s->parts[i].data_start, 0, err);
        if (st != TSR_OK) {
            free(buf);
            return st;
        }
        p += s->parts[i].data_start;
    }
    *out = buf;
    *bytes = total;
    return TSR_OK;
}
