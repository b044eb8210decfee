/* stop_text.h - for model/ only: text on its way out, watched for texts that end it. */
#ifndef TSR_MODEL_STOP_TEXT_H
#define TSR_MODEL_STOP_TEXT_H

#include "model/tokenizer.h"

typedef struct stop_text {
    const char *const *texts; /* NULL-terminated; NULL: none */
    tsr_bytes held;           /* text not given out; append to it, then call take */
    size_t given;             /* bytes at its front that take handed out last */
    size_t seen;              /* bytes at its front in which no text ends */
} stop_text;

/* What can be given out now; last: nothing follows, nothing is held back. *found: a stop text is complete, *out ends in front
 * of it, and there is no more. Valid until the next append or take. */
tsr_span stop_text_take(stop_text *s, bool last, bool *found);

#endif
