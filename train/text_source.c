/* text_source.c - documents of text out of files; see text_source.h. libarchive unpacks: its "raw" format with one filter reads
 * compressed files too. */
#include "train/text_source.h"
#include "format/io.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_BLOCK ((size_t)256 << 10)
#define DATA_BLOCK ((size_t)64 << 10)

struct text_source {
    const text_list *list;
    const char *key;
    size_t line_max;
    size_t next_file;
    uint64_t done;
    /* the open file */
    const char *file;
    int fd, read_errno;
    struct archive *a;
    bool tar;
    char *block;
    /* the open document, or list of documents: a file or a member */
    bool entry, lines, eof;
    char *member; /* NULL: the file itself */
    char *buf;
    size_t used, room;
    uint64_t base; /* of buf's first byte, in the entry */
    /* plain text */
    size_t scanned, chars, given;
    bool begun;
    /* JSON lines */
    size_t at, looked; /* the line's begin; no line end in front of looked */
    uint64_t line;
    json_t *root;
    const char *value;
    size_t value_left;
};

/* "file" or "file: member", for messages. */
static tsr_status fail_here(const text_source *s, tsr_status code, const char *what, tsr_err *err)
{
    return s->member != NULL ? TSR_ERR(err, code, "%s: member %.300s: %s", s->file, s->member, what)
                             : TSR_ERR(err, code, "%s: %s", s->file, what);
}

/* ---- files --------------------------------------------------------------------------------------------------------- */

typedef struct packed_kind {
    const char *ending;
    int filter; /* libarchive's number */
    int (*support)(struct archive *a);
} packed_kind;

static const packed_kind packed_kinds[] = { { ".gz", ARCHIVE_FILTER_GZIP, archive_read_support_filter_gzip },
                                            { ".zst", ARCHIVE_FILTER_ZSTD, archive_read_support_filter_zstd },
                                            { ".xz", ARCHIVE_FILTER_XZ, archive_read_support_filter_xz },
                                            { ".bz2", ARCHIVE_FILTER_BZIP2,
                                              archive_read_support_filter_bzip2 } };

static bool ends_with(const char *name, size_t n, const char *ending)
{
    size_t k = strlen(ending);
    return n > k && memcmp(name + n - k, ending, k) == 0;
}

static bool is_lines(const char *name, size_t n)
{
    return ends_with(name, n, ".jsonl") || ends_with(name, n, ".ndjson");
}

static la_ssize_t read_file(struct archive *a, void *payload, const void **out)
{
    text_source *s = payload;
    (void)a;
    ssize_t n;
    do {
        n = read(s->fd, s->block, FILE_BLOCK);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        s->read_errno = errno;
        archive_set_error(a, errno, "cannot be read");
        return -1;
    }
    s->done += (uint64_t)n;
    *out = s->block;
    return n;
}

static tsr_status archive_failure(const text_source *s, tsr_err *err)
{
    if (s->read_errno != 0) {
        return tsr_fs_error(err, s->read_errno, s->file, "cannot be read");
    }
    const char *why = archive_error_string(s->a);
    char text[300];
    (void)snprintf(text, sizeof text, "damaged: %s", why != NULL ? why : "libarchive gives no reason");
    return fail_here(s, TSR_E_FORMAT, text, err);
}

static void close_file(text_source *s)
{
    if (s->a != NULL) {
        (void)archive_read_free(s->a); /* nothing was written */
        s->a = NULL;
    }
    if (s->fd >= 0) {
        (void)close(s->fd);
        s->fd = -1;
    }
}

static tsr_status open_fd(text_source *s, const text_file *f, tsr_err *err)
{
    struct stat st;
    s->file = f->name;
    s->fd = open(f->name, O_RDONLY | O_CLOEXEC);
    if (s->fd < 0 || fstat(s->fd, &st) != 0) {
        return tsr_fs_error(err, errno, f->name, "cannot be opened");
    }
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != f->bytes ||
        (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec != f->mtime_ns) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: has changed since the build began", f->name);
    }
    (void)posix_fadvise(s->fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* a hint */
    return TSR_OK;
}

static tsr_status open_archive(text_source *s, const packed_kind *packed, tsr_err *err)
{
    s->a = archive_read_new();
    if (s->a == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    int rc = packed != NULL ? packed->support(s->a) : ARCHIVE_OK;
    if (rc != ARCHIVE_OK) { /* it would run another program */
        TSR_FAIL(err, TSR_E_UNSUPPORTED, "%s: this build of libarchive does not read %s", s->file,
                 packed->ending);
    }
    rc = s->tar ? archive_read_support_format_tar(s->a) : archive_read_support_format_raw(s->a);
    if (rc == ARCHIVE_OK && !s->tar) {
        rc = archive_read_support_format_empty(s->a);
    }
    if (rc != ARCHIVE_OK || archive_read_open(s->a, s, NULL, read_file, NULL) != ARCHIVE_OK) {
        return archive_failure(s, err);
    }
    /* a filter that does not recognise its input is left out, and one that does is applied again */
    if (archive_filter_count(s->a) != (packed != NULL ? 2 : 1) ||
        (packed != NULL && archive_filter_code(s->a, 0) != packed->filter)) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is not compressed as its name says (%s), or more than once", s->file,
                 packed != NULL ? packed->ending : "not");
    }
    return TSR_OK;
}

static void begin_entry(text_source *s, bool lines, bool empty)
{
    s->entry = true;
    s->lines = lines;
    s->eof = empty;
    s->begun = false;
    s->used = s->scanned = s->chars = s->given = s->at = s->looked = 0;
    s->line = s->base = 0;
}

static tsr_status open_next(text_source *s, tsr_err *err)
{
    const text_file *f = &s->list->files[s->next_file++];
    const packed_kind *packed = NULL;
    size_t n = strlen(f->name);
    free(s->member);
    s->member = NULL;
    s->read_errno = 0;
    for (size_t i = 0; packed == NULL && i < sizeof packed_kinds / sizeof *packed_kinds; i++) {
        packed = ends_with(f->name, n, packed_kinds[i].ending) ? &packed_kinds[i] : NULL;
    }
    n -= packed != NULL ? strlen(packed->ending) : 0;
    s->tar = ends_with(f->name, n, ".tar");
    TSR_TRY(open_fd(s, f, err));
    TSR_TRY(open_archive(s, packed, err));
    if (!s->tar) {
        struct archive_entry *e;
        int rc = archive_read_next_header(s->a, &e);
        if (rc != ARCHIVE_OK && rc != ARCHIVE_EOF) {
            return archive_failure(s, err);
        }
        begin_entry(s, is_lines(f->name, n), rc == ARCHIVE_EOF);
    }
    return TSR_OK;
}

/* *found false: the tar's end. */
static tsr_status next_member(text_source *s, bool *found, tsr_err *err)
{
    struct archive_entry *e;
    free(s->member);
    s->member = NULL;
    for (*found = false;;) {
        int rc = archive_read_next_header(s->a, &e);
        if (rc == ARCHIVE_EOF) {
            return TSR_OK;
        }
        if (rc != ARCHIVE_OK && rc != ARCHIVE_WARN) { /* a warning: a name that this locale cannot say */
            return archive_failure(s, err);
        }
        const char *name = archive_entry_pathname(e);
        name = name != NULL ? name : archive_entry_pathname_utf8(e);
        free(s->member);
        s->member = strdup(name != NULL ? name : "?");
        if (s->member == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        if (archive_entry_filetype(e) == AE_IFDIR && archive_entry_hardlink(e) == NULL) {
            continue;
        }
        if (archive_entry_filetype(e) != AE_IFREG || archive_entry_hardlink(e) != NULL) {
            return fail_here(s, TSR_E_UNSUPPORTED, "is a link or a device", err);
        }
        begin_entry(s, is_lines(s->member, strlen(s->member)), false);
        *found = true;
        return TSR_OK;
    }
}

/* Opens the next document or list of documents; *got false: there is none. */
static tsr_status next_entry(text_source *s, bool *got, tsr_err *err)
{
    for (*got = false;;) {
        if (s->a != NULL && s->tar) {
            TSR_TRY(next_member(s, got, err));
            if (*got) {
                return TSR_OK;
            }
        }
        close_file(s);
        if (s->next_file == s->list->count) {
            return TSR_OK;
        }
        TSR_TRY(open_next(s, err));
        if (!s->tar) {
            *got = true;
            return TSR_OK;
        }
    }
}

/* ---- plain text ----------------------------------------------------------------------------------------------------- */

/* Reads on, behind what buf holds. */
static tsr_status fill(text_source *s, tsr_err *err)
{
    if (s->room - s->used < DATA_BLOCK) {
        size_t room = s->room * 2 + 2 * DATA_BLOCK;
        char *grown = realloc(s->buf, room);
        if (grown == NULL) {
            TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
        }
        s->buf = grown;
        s->room = room;
    }
    la_ssize_t n = archive_read_data(s->a, s->buf + s->used, DATA_BLOCK);
    if (n < 0) {
        return archive_failure(s, err);
    }
    s->eof = n == 0;
    s->used += (size_t)n;
    return TSR_OK;
}

static void drop(text_source *s, size_t n)
{
    memmove(s->buf, s->buf + n, s->used - n);
    s->used -= n;
    s->base += n;
}

/* Bytes of the UTF-8 character at p; 0: it goes on behind n; -1: it is none. */
static int char_at(const uint8_t *p, size_t n)
{
    if (p[0] < 0x80) {
        return p[0] != 0 ? 1 : -1;
    }
    int length = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4) {
        return -1;
    }
    uint8_t low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i < length; i++, low = 0x80, high = 0xbf) {
        if ((size_t)i >= n) {
            return 0;
        }
        if (p[i] < low || p[i] > high) {
            return -1;
        }
    }
    return length;
}

/* Moves *at on over whole characters until *chars are TEXT_PART_CHARS or n is reached. False: no text at *at. */
static bool scan(const char *p, size_t n, size_t *at, size_t *chars)
{
    while (*at < n && *chars < TEXT_PART_CHARS) {
        int length = char_at((const uint8_t *)p + *at, n - *at);
        if (length <= 0) {
            return length == 0;
        }
        *at += (size_t)length;
        (*chars)++;
    }
    return true;
}

static tsr_status no_text(const text_source *s, tsr_err *err)
{
    char what[100];
    bool binary = s->scanned < s->used && s->buf[s->scanned] == '\0';
    (void)snprintf(what, sizeof what, "byte %llu: %s", (unsigned long long)(s->base + s->scanned),
                   binary ? "a NUL: not a text file" : "not UTF-8");
    return fail_here(s, TSR_E_FORMAT, what, err);
}

static tsr_status next_text(text_source *s, text_part *part, bool *got, tsr_err *err)
{
    drop(s, s->given);
    s->scanned = s->chars = s->given = 0;
    for (;;) {
        if (!scan(s->buf, s->used, &s->scanned, &s->chars) ||
            (s->eof && s->scanned < s->used && s->chars < TEXT_PART_CHARS)) {
            return no_text(s, err);
        }
        if (s->chars == TEXT_PART_CHARS || s->eof) {
            break;
        }
        TSR_TRY(fill(s, err));
    }
    s->given = s->scanned;
    bool last = s->eof && s->scanned == s->used;
    *part = (text_part){ .text = s->buf, .bytes = s->given, .first = !s->begun, .last = last };
    s->begun = true;
    s->entry = !last;
    *got = true;
    return TSR_OK;
}

/* ---- JSON lines --------------------------------------------------------------------------------------------------------- */

static tsr_status fail_line(const text_source *s, tsr_status code, const char *what, tsr_err *err)
{
    char text[400];
    (void)snprintf(text, sizeof text, "line %llu: %s", (unsigned long long)s->line, what);
    return fail_here(s, code, text, err);
}

/* The next part of the line's text. */
static void cut_value(text_source *s, text_part *part, bool first)
{
    size_t at = 0, chars = 0;
    bool text = scan(s->value, s->value_left, &at, &chars);
    TSR_ASSERT(text); /* jansson has checked it */
    *part = (text_part){ .text = s->value, .bytes = at, .first = first, .last = at == s->value_left };
    s->value += at;
    s->value_left -= at;
}

static tsr_status take_line(text_source *s, const char *p, size_t n, text_part *part, tsr_err *err)
{
    json_error_t e;
    if (memchr(p, '\0', n) != NULL) {
        return fail_line(s, TSR_E_FORMAT, "a NUL: not a text file", err);
    }
    s->root = json_loadb(p, n, JSON_DECODE_INT_AS_REAL, &e);
    if (s->root == NULL) {
        char what[250];
        (void)snprintf(what, sizeof what, "byte %d: no JSON: %s", e.position, e.text);
        return fail_line(s, TSR_E_FORMAT, what, err);
    }
    const json_t *v = json_object_get(s->root, s->key);
    if (!json_is_string(v)) {
        char what[250];
        (void)snprintf(what, sizeof what, "%s \"%.100s\" (name the text's key with --text-key)",
                       !json_is_object(s->root) ? "is no object with a string"
                       : v == NULL              ? "has no"
                                                : "no string at",
                       s->key);
        return fail_line(s, TSR_E_FORMAT, what, err);
    }
    s->value = json_string_value(v);
    s->value_left = json_string_length(v);
    cut_value(s, part, true);
    return TSR_OK;
}

/* The next line without its end; *found false: there is none. */
static tsr_status find_line(text_source *s, size_t *from, size_t *bytes, bool *found, tsr_err *err)
{
    for (*found = true;;) {
        const char *end = s->used > s->looked ? memchr(s->buf + s->looked, '\n', s->used - s->looked) : NULL;
        size_t stop = end != NULL ? (size_t)(end - s->buf) : s->used;
        s->looked = stop;
        if (stop - s->at > s->line_max) {
            s->line++;
            return fail_line(s, TSR_E_LIMIT, "longer than the memory limit allows (raise --mem-limit)", err);
        }
        if (end != NULL || s->eof) {
            *found = end != NULL || stop > s->at;
            *from = s->at;
            *bytes = stop - s->at;
            s->at = s->looked = end != NULL ? stop + 1 : stop;
            s->line++;
            return TSR_OK;
        }
        drop(s, s->at);
        s->looked -= s->at;
        s->at = 0;
        TSR_TRY(fill(s, err));
    }
}

static tsr_status next_line(text_source *s, text_part *part, bool *got, tsr_err *err)
{
    if (s->value_left > 0) {
        cut_value(s, part, false);
        *got = true;
        return TSR_OK;
    }
    json_decref(s->root);
    s->root = NULL;
    for (;;) {
        size_t from = 0, bytes = 0, k = 0;
        bool found;
        TSR_TRY(find_line(s, &from, &bytes, &found, err));
        if (!found) {
            s->entry = false;
            *got = false;
            return TSR_OK;
        }
        while (k < bytes && memchr(" \t\r", s->buf[from + k], 3) != NULL) {
            k++;
        }
        if (k < bytes) { /* not blank */
            *got = true;
            return take_line(s, s->buf + from, bytes, part, err);
        }
    }
}

/* ---- all ------------------------------------------------------------------------------------------------------------------ */

tsr_status text_source_open(text_source **out, const text_list *list, const char *text_key, size_t line_max,
                            tsr_err *err)
{
    text_source *s = *out = calloc(1, sizeof *s);
    if (s == NULL) {
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    s->list = list;
    s->key = text_key;
    s->line_max = line_max;
    s->fd = -1;
    s->block = malloc(FILE_BLOCK);
    s->buf = malloc(DATA_BLOCK);
    s->room = DATA_BLOCK;
    if (s->block == NULL || s->buf == NULL) {
        text_source_close(out);
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    return TSR_OK;
}

void text_source_close(text_source **s)
{
    if (*s != NULL) {
        close_file(*s);
        json_decref((*s)->root);
        free((*s)->member);
        free((*s)->block);
        free((*s)->buf);
        free(*s);
        *s = NULL;
    }
}

tsr_status text_source_next(text_source *s, text_part *part, bool *got, tsr_err *err)
{
    for (*got = false; !*got;) {
        if (!s->entry) {
            TSR_TRY(next_entry(s, got, err));
            if (!*got) {
                return TSR_OK;
            }
        }
        TSR_TRY(s->lines ? next_line(s, part, got, err) : next_text(s, part, got, err));
    }
    return TSR_OK;
}

uint64_t text_source_done(const text_source *s)
{
    return s->done;
}
