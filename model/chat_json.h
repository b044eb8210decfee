/* chat_json.h - JSON as Python's json.dumps(ensure_ascii=False) spells it: K3's prompts contain such text, and another
 * spelling is other tokens. Private to model/. */
#ifndef TSR_MODEL_CHAT_JSON_H
#define TSR_MODEL_CHAT_JSON_H

#include "model/tokenizer_priv.h"

#include <jansson.h>

/* Appends v. compact: separators "," and ":" and the keys of all objects sorted by bytes; otherwise ", " and ": " and
 * the order of the source. TSR_E_LIMIT: out of memory. */
tsr_status chat_json_put(tsr_bytes *out, const json_t *v, bool compact, tsr_err *err);
/* Appends a number as Python's repr() has it: the shortest digits that read back as x. */
tsr_status chat_json_real(tsr_bytes *out, double x, tsr_err *err);

#endif
