/* out_file.c - files that appear whole or not at all. */
#include "cli/out.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

tsr_status tsr_out_file_open(tsr_out_file *o, const char *name, tsr_err *err)
{
    *o = (tsr_out_file){ .name = name };
    if (access(name, F_OK) == 0) {
        TSR_FAIL(err, TSR_E_CONFLICT, "%s: exists already (choose another name, or remove it)", name);
    }
    if (asprintf(&o->part, "%s.part-%ld", name, (long)getpid()) < 0) {
        o->part = NULL;
        TSR_FAIL(err, TSR_E_LIMIT, "out of memory");
    }
    o->f = fopen(o->part, "wxe");
    if (o->f == NULL) {
        tsr_status st = TSR_ERR(err, errno == ENOENT ? TSR_E_MISSING : TSR_E_IO, "%s: cannot be created: %s",
                                name, strerror(errno));
        free(o->part);
        o->part = NULL;
        return st;
    }
    return TSR_OK;
}

/* Puts the finished file under its name, which must still be free. */
static int publish(const char *part, const char *path)
{
    if (renameat2(AT_FDCWD, part, AT_FDCWD, path, RENAME_NOREPLACE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return errno;
    }
    return link(part, path) == 0 && unlink(part) == 0 ? 0 : errno; /* file systems without RENAME_NOREPLACE */
}

tsr_status tsr_out_file_close(tsr_out_file *o, tsr_status st, tsr_err *err)
{
    if (o->f == NULL) {
        return st;
    }
    int error = 0;
    if (st == TSR_OK && (fflush(o->f) != 0 || ferror(o->f) || fsync(fileno(o->f)) != 0)) {
        error = errno != 0 ? errno : EIO;
    }
    if (fclose(o->f) != 0 && error == 0) {
        error = errno;
    }
    if (st == TSR_OK && error == 0) {
        error = publish(o->part, o->name);
    }
    if (st == TSR_OK && error != 0) {
        st = TSR_ERR(err, error == EEXIST ? TSR_E_CONFLICT : TSR_E_IO, "%s: cannot be written: %s", o->name,
                     strerror(error));
    }
    if (st != TSR_OK) {
        (void)unlink(o->part); /* it may be gone already */
    }
    free(o->part);
    *o = (tsr_out_file){ 0 };
    return st;
}
