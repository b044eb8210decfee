/* layouts.h - private: the registered layouts, one table each. */
#ifndef TSR_CONVERT_LAYOUTS_H
#define TSR_CONVERT_LAYOUTS_H

#include "convert/convert.h"

extern const tsr_layout tsr_layout_kimi_k3, tsr_layout_kimi_linear;
extern const tsr_layout tsr_layout_canonical; /* names as they are; experts become families */
extern const tsr_layout tsr_layout_raw;       /* names as they are; nothing is grouped */

/* What a pattern's placeholders stood for. */
typedef struct layout_binding {
    char number[2][12]; /* {l}, {e} */
    const char *rest;   /* {*} */
} layout_binding;
bool layout_match(const char *pattern, const char *name, layout_binding *b);
bool layout_emit(const char *pattern, const layout_binding *b, char *buf, size_t room);

#endif
