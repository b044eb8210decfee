/* recipe_tree.h - private: a YAML text as a tree with line numbers. The one place that knows libyaml.
 *
 * Only what a recipe needs: one document of maps, lists and scalars. Anchors that are used, tags, keys that are not plain text and
 * duplicate keys are refused, and so is what is too long, too deep or has too many values. */
#ifndef TSR_TRAIN_RECIPE_TREE_H
#define TSR_TRAIN_RECIPE_TREE_H

#include "format/base.h"

#define TSR_TREE_BYTES_MAX ((size_t)1 << 20)
#define TSR_TREE_DEPTH_MAX 16
#define TSR_TREE_KEYS_MAX 512 /* of one map */
#define TSR_TREE_NODES_MAX 65536

typedef enum tsr_tree_kind { TSR_TREE_TEXT, TSR_TREE_LIST, TSR_TREE_MAP } tsr_tree_kind;

typedef struct tsr_tree tsr_tree;
struct tsr_tree {
    tsr_tree_kind kind;
    int line;         /* from 1; 0: not from the file but from a setting */
    bool plain;       /* text without quotes: may mean a number, true, false or nothing */
    const char *text; /* scalars */
    const char *key;  /* in a map; NULL in a list */
    tsr_tree *first, *last, *next;
    int64_t count; /* of children */
};

/* Everything is taken from the arena. name: for messages. TSR_E_FORMAT, TSR_E_LIMIT. */
TSR_NODISCARD tsr_status tsr_tree_parse(tsr_tree **out, tsr_arena *a, const char *text, size_t bytes,
                                        const char *name, tsr_err *err);
/* Puts a value (YAML itself) at a dotted key; maps on the way are made, entries of lists must be there or be the next one.
 * An empty value takes the key away: its default holds again. */
TSR_NODISCARD tsr_status tsr_tree_set(tsr_tree *root, tsr_arena *a, const char *key, const char *value,
                                      tsr_err *err);
/* NULL: t is no map, or has no such key. */
tsr_tree *tsr_tree_get(const tsr_tree *t, const char *key);
/* Nothing at all, or a plain null, ~ or empty scalar. */
bool tsr_tree_null(const tsr_tree *t);

#endif
