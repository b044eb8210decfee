/* recipe_tree.c - YAML into a tree; see recipe_tree.h. */
#include "train/recipe_tree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

typedef struct loader {
    yaml_document_t doc;
    tsr_arena *arena;
    const char *name;
    bool *used; /* by number of the node in the document: a node used twice came through an alias */
    size_t nodes;
    bool no_lines;
    tsr_err *err;
} loader;

static tsr_status out_of_memory(const loader *l)
{
    TSR_FAIL(l->err, TSR_E_LIMIT, "%s: out of memory", l->name);
}

static int line_of(const yaml_node_t *n)
{
    return n->start_mark.line < INT32_MAX ? (int)n->start_mark.line + 1 : INT32_MAX;
}

/* The text of a scalar. */
static tsr_status scalar(loader *l, const yaml_node_t *n, const char **out)
{
    const char *s = (const char *)n->data.scalar.value;
    size_t bytes = n->data.scalar.length;
    if (memchr(s, '\0', bytes) != NULL) {
        TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: a zero byte in a value", l->name, line_of(n));
    }
    *out = tsr_arena_strndup(l->arena, s, bytes);
    return *out != NULL ? TSR_OK : out_of_memory(l);
}

static void append(tsr_tree *parent, tsr_tree *child)
{
    if (parent->last != NULL) {
        parent->last->next = child;
    } else {
        parent->first = child;
    }
    parent->last = child;
    parent->count++;
}

static tsr_status build(loader *l, int number, int depth, tsr_tree **out);

static tsr_status build_map(loader *l, const yaml_node_t *n, int depth, tsr_tree *t)
{
    for (const yaml_node_pair_t *p = n->data.mapping.pairs.start; p < n->data.mapping.pairs.top; p++) {
        const yaml_node_t *k = yaml_document_get_node(&l->doc, p->key);
        int line = line_of(k);
        if (k->type != YAML_SCALAR_NODE) {
            TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: a key must be text, not a list or a map", l->name, line);
        }
        const char *key;
        TSR_TRY(scalar(l, k, &key));
        if (tsr_tree_get(t, key) != NULL) {
            TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: %.80s: is there twice (remove one)", l->name, line, key);
        }
        if (t->count == TSR_TREE_KEYS_MAX) {
            TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: more than %d keys in a map", l->name, line,
                     TSR_TREE_KEYS_MAX);
        }
        tsr_tree *child;
        TSR_TRY(build(l, p->value, depth + 1, &child));
        child->key = key;
        append(t, child);
    }
    return TSR_OK;
}

static tsr_status check_node(loader *l, int number, const yaml_node_t *n, int depth)
{
    int line = line_of(n);
    if (l->used[number]) {
        TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: aliases (*name) are not supported (write the value out)",
                 l->name, line);
    }
    l->used[number] = true;
    if (depth > TSR_TREE_DEPTH_MAX || ++l->nodes > TSR_TREE_NODES_MAX) {
        TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: %s", l->name, line,
                 depth > TSR_TREE_DEPTH_MAX ? "is nested too deeply for a recipe"
                                            : "has too many values for a recipe");
    }
    const char *plain = n->type == YAML_SCALAR_NODE     ? YAML_DEFAULT_SCALAR_TAG
                        : n->type == YAML_SEQUENCE_NODE ? YAML_DEFAULT_SEQUENCE_TAG
                                                        : YAML_DEFAULT_MAPPING_TAG;
    if (n->tag != NULL && strcmp((const char *)n->tag, plain) != 0) {
        TSR_FAIL(l->err, TSR_E_FORMAT, "%s:%d: tags (!name) are not supported (remove it)", l->name, line);
    }
    return TSR_OK;
}

static tsr_status build(loader *l, int number, int depth, tsr_tree **out)
{
    const yaml_node_t *n = yaml_document_get_node(&l->doc, number);
    *out = NULL;
    TSR_TRY(check_node(l, number, n, depth));
    tsr_tree *t = tsr_arena_alloc(l->arena, sizeof *t);
    if (t == NULL) {
        return out_of_memory(l);
    }
    t->line = l->no_lines ? 0 : line_of(n);
    if (n->type == YAML_SCALAR_NODE) {
        t->kind = TSR_TREE_TEXT;
        t->plain = n->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
        TSR_TRY(scalar(l, n, &t->text));
    } else if (n->type == YAML_MAPPING_NODE) {
        t->kind = TSR_TREE_MAP;
        TSR_TRY(build_map(l, n, depth, t));
    } else {
        t->kind = TSR_TREE_LIST;
        for (const yaml_node_item_t *i = n->data.sequence.items.start; i < n->data.sequence.items.top; i++) {
            tsr_tree *child;
            TSR_TRY(build(l, *i, depth + 1, &child));
            append(t, child);
        }
    }
    *out = t;
    return TSR_OK;
}

static tsr_status not_yaml(const yaml_parser_t *p, const char *name, tsr_err *err)
{
    if (p->error == YAML_MEMORY_ERROR) {
        TSR_FAIL(err, TSR_E_LIMIT, "%s: out of memory", name);
    }
    TSR_FAIL(err, TSR_E_FORMAT, "%s:%zu: not YAML: %s%s%s", name, p->problem_mark.line + 1,
             p->context != NULL ? p->context : "", p->context != NULL ? ": " : "",
             p->problem != NULL ? p->problem : "cannot be read");
}

/* After the first document the file must end. */
static tsr_status expect_end(yaml_parser_t *p, const char *name, tsr_err *err)
{
    yaml_document_t second;
    if (!yaml_parser_load(p, &second)) {
        return not_yaml(p, name, err);
    }
    bool more = yaml_document_get_root_node(&second) != NULL;
    yaml_document_delete(&second);
    if (more) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: has more than one document (remove the lines \"---\")", name);
    }
    return TSR_OK;
}

static tsr_status parse(loader *l, const char *text, size_t bytes, tsr_tree **out)
{
    yaml_parser_t p;
    *out = NULL;
    if (!yaml_parser_initialize(&p)) {
        return out_of_memory(l);
    }
    yaml_parser_set_input_string(&p, (const unsigned char *)text, bytes);
    if (!yaml_parser_load(&p, &l->doc)) {
        tsr_status st = not_yaml(&p, l->name, l->err);
        yaml_parser_delete(&p);
        return st;
    }
    tsr_status st = TSR_OK;
    size_t count = (size_t)(l->doc.nodes.top - l->doc.nodes.start);
    if (count > 0) {
        l->used = calloc(count + 1, sizeof *l->used); /* libyaml counts nodes from 1 */
        st = l->used == NULL ? out_of_memory(l) : build(l, 1, 1, out);
        free(l->used);
        if (st == TSR_OK) {
            st = expect_end(&p, l->name, l->err);
        }
    }
    yaml_document_delete(&l->doc);
    yaml_parser_delete(&p);
    return st;
}

tsr_status tsr_tree_parse(tsr_tree **out, tsr_arena *a, const char *text, size_t bytes, const char *name,
                          tsr_err *err)
{
    *out = NULL;
    if (bytes > TSR_TREE_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: is too large for a recipe (%zu bytes; at most %zu)", name, bytes,
                 TSR_TREE_BYTES_MAX);
    }
    loader l = { .arena = a, .name = name, .err = err };
    TSR_TRY(parse(&l, text, bytes, out));
    if (*out == NULL || (*out)->kind != TSR_TREE_MAP) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: %s", name,
                 *out == NULL ? "is empty" : "must be a map of keys to values");
    }
    return TSR_OK;
}

tsr_tree *tsr_tree_get(const tsr_tree *t, const char *key)
{
    for (tsr_tree *c = t != NULL && t->kind == TSR_TREE_MAP ? t->first : NULL; c != NULL; c = c->next) {
        if (strcmp(c->key, key) == 0) {
            return c;
        }
    }
    return NULL;
}

bool tsr_tree_null(const tsr_tree *t)
{
    return t == NULL || (t->kind == TSR_TREE_TEXT && t->plain &&
                         (t->text[0] == '\0' || strcmp(t->text, "~") == 0 || strcmp(t->text, "null") == 0));
}

/* ---- settings -------------------------------------------------------------------------------------------------- */

/* The child of a dotted key's part; made when it is not there and may be. NULL: it cannot be, or out of memory. */
static tsr_tree *step_into(tsr_tree *t, tsr_arena *a, const char *part, size_t n)
{
    if (tsr_tree_null(t) && t->kind == TSR_TREE_TEXT) {
        t->kind = TSR_TREE_MAP;
    }
    if (t->kind == TSR_TREE_TEXT || n == 0) {
        return NULL;
    }
    char *key = tsr_arena_strndup(a, part, n);
    if (key == NULL) {
        return NULL;
    }
    tsr_tree *c = NULL;
    if (t->kind == TSR_TREE_MAP) {
        c = tsr_tree_get(t, key);
        if (c == NULL && t->count == TSR_TREE_KEYS_MAX) {
            return NULL;
        }
    } else {
        char *end;
        long long at = strtoll(key, &end, 10);
        if (key[0] < '0' || key[0] > '9' || *end != '\0' || at > t->count) {
            return NULL;
        }
        c = t->first;
        for (long long i = 0; i < at && c != NULL; i++) {
            c = c->next;
        }
    }
    if (c == NULL) {
        c = tsr_arena_alloc(a, sizeof *c);
        if (c != NULL) {
            *c = (tsr_tree){
                .kind = TSR_TREE_TEXT, .plain = true, .text = "", .key = t->kind == TSR_TREE_MAP ? key : NULL
            };
            append(t, c);
        }
    }
    return c;
}

tsr_status tsr_tree_set(tsr_tree *root, tsr_arena *a, const char *key, const char *value, tsr_err *err)
{
    tsr_tree *at = root;
    int depth = 1;
    for (const char *part = key;; depth++) {
        size_t n = strcspn(part, ".");
        at = depth <= TSR_TREE_DEPTH_MAX ? step_into(at, a, part, n) : NULL;
        if (at == NULL) {
            TSR_FAIL(err, TSR_E_FORMAT,
                     "--set %.200s: leads nowhere at \"%.*s\" (entries of lists have numbers, from 0)", key,
                     n < 80 ? (int)n : 80, part);
        }
        if (part[n] == '\0') {
            break;
        }
        part += n + 1;
    }
    char name[240];
    (void)snprintf(name, sizeof name, "--set %.200s", key);
    size_t bytes = strlen(value);
    if (bytes > TSR_TREE_BYTES_MAX) {
        TSR_FAIL(err, TSR_E_FORMAT, "%s: the value is too long", name);
    }
    loader l = { .arena = a, .name = name, .no_lines = true, .err = err };
    tsr_tree *v;
    TSR_TRY(parse(&l, value, bytes, &v));
    tsr_tree *next = at->next;
    const char *kept = at->key;
    *at = v != NULL ? *v : (tsr_tree){ .kind = TSR_TREE_TEXT, .plain = true, .text = "" };
    at->next = next;
    at->key = kept;
    return TSR_OK;
}
